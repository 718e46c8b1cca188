"""`python -m equivtests …`: a module for each group of commands; `command_line` says which there are."""

from equivtests.cli.command_line import main

__all__ = ["main"]
