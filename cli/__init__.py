"""The command line, `specialized-decode`."""
