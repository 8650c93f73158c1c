"""Worker processes on this machine or started by others, and links of a chosen speed between them."""
