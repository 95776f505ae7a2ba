"""Conformance suites for plugins: subclass one as `Test...` in a pytest file, or run it with `failures`."""

from __future__ import annotations

from rwkv_lightning.core.testing.backends import BackendSuite
from rwkv_lightning.core.testing.routes import RouteGroupSuite
from rwkv_lightning.core.testing.samplers import SamplerSuite
from rwkv_lightning.core.testing.stores import StateStoreSuite
from rwkv_lightning.core.testing.suite import Suite, failures

__all__ = ["BackendSuite", "RouteGroupSuite", "SamplerSuite", "StateStoreSuite", "Suite", "failures"]
