"""Programs that measure what diffquant does in files and processes, most beside other libraries."""
