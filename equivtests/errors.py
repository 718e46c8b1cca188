"""Errors that a user can act on. Each message names what was wrong, where, and what to do next."""

from __future__ import annotations


class EquivtestsError(Exception):
    """Base of all errors that end in one line and a non-zero exit."""


class CaseError(EquivtestsError):
    """A case, fixture or window that is not well formed, or that lies too close to a discontinuity."""


class AdapterError(EquivtestsError):
    """An adapter that cannot be loaded or that breaks the contract."""


class ModelError(EquivtestsError):
    """A model of a user's own that cannot be loaded, or that cannot serve as a reference."""


class RecordError(EquivtestsError):
    """A record directory that is incomplete, malformed or belongs to another case."""


class RanksError(EquivtestsError):
    """Processes or devices that were asked for and are not there."""
