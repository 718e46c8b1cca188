"""Adapters: the code that lets a training framework run a case. The thing under test."""
