"""What every room needs and none owns: files, devices, versions, progress."""
