"""The command line, `kareus-pp`: one module for each command."""
