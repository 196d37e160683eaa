"""What every room needs and none owns: files, devices, the machine, versions, progress."""
