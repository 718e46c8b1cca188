"""Rules that a framework declares, as a value or as a function of the case: examined before anything is judged by them."""

from __future__ import annotations

from collections.abc import Callable

from equivtests.cases.case import Case, Semantics, from_json, to_json
from equivtests.errors import CaseError


def declared(rule: Semantics | Callable[[Case], Semantics], case: Case, whose: str) -> Semantics:
    """The rule of a case, typed as strictly as in a case file (lists become tuples).

    Raises CaseError, beginning with `whose`, if the function raises, or if what it gives is no rule of this case.
    """
    found = called(rule, case, whose) if callable(rule) else rule
    if not isinstance(found, Semantics):
        raise CaseError(f"{whose}: give Semantics(…) or a function from the case to it, not {type(found).__name__}")
    try:
        typed: Semantics = from_json(Semantics, plain(found, whose), whose)
        case.replace(semantics=typed)
    except CaseError as error:
        raise CaseError(str(error) if str(error).startswith(whose) else f"{whose}: {error}") from None
    return typed


def called(rule: Callable[[Case], Semantics], case: Case, whose: str) -> Semantics:
    try:
        return rule(case)
    except Exception as error:
        raise CaseError(f"{whose}: the function raised {type(error).__name__} on {case.name}: {error}") from error


def plain(rule: Semantics, whose: str) -> object:
    """Plain JSON data of a rule."""
    try:
        return to_json(rule)
    except (TypeError, ValueError):
        raise CaseError(f"{whose}: write it in Python's own numbers, words and tuples: {str(rule)[:120]}…") from None
