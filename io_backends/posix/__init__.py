"""Files and directories, on local and on network file systems."""
