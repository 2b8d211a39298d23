"""The command line: one file a command, the table of commands in main. A command imports torch when it runs."""
