"""Test which systems are refused."""

import sys

import pytest

from distributed_training.settings import system
from distributed_training.settings.errors import UserError


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(UserError, match="WSL 2"):
        system.require_system()
