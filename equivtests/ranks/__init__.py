"""Ranks: real processes in real process groups, standing by, watched, and replaced when one fails."""
