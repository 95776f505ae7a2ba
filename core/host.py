"""`PluginHost`: loads the plugins, checks them, and is the one place that calls hooks.

Each hook has one typed method here. Nothing else in the project touches pluggy.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from rwkv_lightning.core import discovery, hookspecs
from rwkv_lightning.core.config import Settings
from rwkv_lightning.core.discovery import Found
from rwkv_lightning.core.errors import PluginError, SettingsError, StartError
from rwkv_lightning.core.interfaces import Backend, RouteGroup, Sampler, SamplerContext, StateStore
from rwkv_lightning.core.plugin_checks import check_hooks, check_routes
from rwkv_lightning.core.plugin_sections import check_sections, validate_section
from rwkv_lightning.core.registry import Origin, Registry, UnknownName

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from pydantic import BaseModel
    from starlette.requests import Request

    from rwkv_lightning.core.engine import RequestSummary
    from rwkv_lightning.core.interfaces import ServerContext

log = logging.getLogger(__name__)

BackendFactory = Callable[[], Backend]
SamplerFactory = Callable[[SamplerContext], Sampler]
StoreFactory = Callable[[], StateStore]


@dataclass(slots=True)
class Plugin:
    """A loaded plugin: what it is, where it is from, its own settings, the hooks it implements."""

    value: object
    origin: Origin
    section: BaseModel | None = None
    hooks: dict[str, Callable[..., Any]] = field(default_factory=dict)


class PluginHost:
    """The loaded plugins and what they registered.

    Raises PluginError or SettingsError from the constructor when anything is wrong with a plugin that is to be loaded.

    Args:
        settings: which plugins to load, and their sections.
        found: the installed plugins; by default those that the environment declares.
    """

    def __init__(self, settings: Settings, found: Sequence[Found] | None = None) -> None:
        self.found = list(discovery.discover() if found is None else found)
        self.backends: Registry[BackendFactory] = Registry("backend")
        self.samplers: Registry[SamplerFactory] = Registry("sampler")
        self.stores: Registry[StoreFactory] = Registry("state store")
        self.routes: Registry[RouteGroup] = Registry("route group")
        self._manager = pluggy.PluginManager(hookspecs.NAMESPACE)
        self._manager.add_hookspecs(hookspecs)
        if settings.trace_plugins:
            self._manager.add_hookcall_monitoring(_trace_call, _trace_result)
        chosen = discovery.select(self.found, settings.plugin, settings.disable_plugin)
        self.plugins = [self._load(plugin) for plugin in chosen]
        for plugin in self.plugins:
            plugin.hooks = self._callers(plugin)
        self._read_sections(settings)
        for plugin in self.plugins:
            self._register(plugin)
        check_routes(self.routes)
        self._started: list[Plugin] = []

    # Loading

    def _load(self, found: Found) -> Plugin:
        value = discovery.load(found)
        check_hooks(self._manager, value, found.origin)
        try:
            self._manager.register(value, found.name)
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(f"{found.origin}: {str(error).splitlines()[-1]}") from error
        return Plugin(value, found.origin)

    def _callers(self, plugin: Plugin) -> dict[str, Callable[..., Any]]:
        """Per hook that the plugin implements, a function that calls this plugin alone."""
        others = [other.value for other in self.plugins if other is not plugin]
        callers = self._manager.get_hookcallers(plugin.value) or []
        return {caller.name: self._manager.subset_hook_caller(caller.name, others) for caller in callers}

    def _read_sections(self, settings: Settings) -> None:
        loaded = {plugin.origin.plugin: "plugin_settings" in plugin.hooks for plugin in self.plugins}
        disabled = {name.lower() for name in settings.disable_plugin}
        check_sections(settings.plugins, self.found, loaded, disabled)
        for plugin in self.plugins:
            for model in self._call(plugin, "plugin_settings"):
                plugin.section = validate_section(plugin.origin, model, settings.plugins)

    def _register(self, plugin: Plugin) -> None:
        for hook, register in (
            ("register_backends", self._adder(self.backends, plugin.origin)),
            ("register_samplers", self._adder(self.samplers, plugin.origin)),
            ("register_state_stores", self._adder(self.stores, plugin.origin)),
            ("register_routes", self._route_adder(plugin.origin)),
        ):
            self._call(plugin, hook, register=register, section=plugin.section)

    def _adder(self, registry: Registry[Any], origin: Origin) -> Callable[..., None]:
        def register(name: str, factory: Callable[..., Any], description: str) -> None:
            if not callable(factory):
                raise PluginError(f"{origin}: the factory of {registry.kind} {name!r} is not callable")
            registry.add(name, factory, description, origin)

        return register

    def _route_adder(self, origin: Origin) -> Callable[[RouteGroup], None]:
        def register(group: RouteGroup) -> None:
            if not isinstance(group, RouteGroup):
                raise PluginError(f"{origin} registers {type(group).__name__} as routes; register a RouteGroup")
            if group.validation_status not in (400, 422):
                raise PluginError(f"{origin}: route group {group.name!r} needs validation_status 400 or 422")
            self.routes.add(group.name, group, "", origin)

        return register

    def _call(self, plugin: Plugin, hook: str, **arguments: Any) -> list[Any]:
        """Call one plugin's hook at start-up. Raises PluginError with the plugin's exception as cause."""
        if hook not in plugin.hooks:
            return []
        try:
            results: list[Any] = plugin.hooks[hook](**arguments)
            return results
        except StartError:
            raise
        except Exception as error:
            raise PluginError(f"{plugin.origin} failed in {hook}: {type(error).__name__}: {error}") from error

    # What was registered

    def create_backend(self, name: str) -> Backend:
        """A new backend by name. Raises SettingsError for an unknown one, PluginError when its factory fails."""
        try:
            backend = self.backends.get(name)
        except UnknownName as error:
            raise SettingsError(f"--inference-engine: {error}") from None
        try:
            return backend.value()
        except Exception as error:
            raise PluginError(
                f"backend {backend.name!r} of {backend.origin} cannot be made: {type(error).__name__}: {error}"
            ) from error

    def create_store(self, name: str) -> StateStore:
        """A new, closed state store by name. Raises SettingsError for an unknown one, PluginError when it fails."""
        try:
            store = self.stores.get(name)
        except UnknownName as error:
            raise SettingsError(f"--state-store: {error}") from None
        try:
            return store.value()
        except Exception as error:
            raise PluginError(
                f"state store {store.name!r} of {store.origin} cannot be made: {type(error).__name__}: {error}"
            ) from error

    def create_samplers(self, context: SamplerContext) -> dict[str, Sampler]:
        """Every registered sampler, made for one model, by its name in lower case."""
        samplers = {}
        for sampler in self.samplers:
            try:
                samplers[sampler.name] = sampler.value(context)
            except Exception as error:
                raise PluginError(
                    f"sampler {sampler.name!r} of {sampler.origin} cannot be made: {type(error).__name__}: {error}"
                ) from error
        return samplers

    def route_groups(self) -> list[RouteGroup]:
        """The route groups in the order in which they were registered, the project's own first."""
        return [group.value for group in self.routes]

    # Hooks of a running server

    def choose_backend(self, settings: Settings, checkpoint: Path) -> str:
        """The backend's name for `--inference-engine auto`."""
        name = self._manager.hook.choose_backend(settings=settings, checkpoint=checkpoint)
        return str(name or Settings.model_fields["inference_engine"].default)

    def authenticate(self, request: Request) -> Any:
        """Who calls, or None when no plugin knows. Raises RequestError when one refuses."""
        return self._manager.hook.authenticate(request=request)

    def register_metrics(self, registry: CollectorRegistry) -> None:
        """Let the plugins add their collectors."""
        for plugin in self.plugins:
            self._call(plugin, "register_metrics", registry=registry)

    def startup(self, context: ServerContext) -> None:
        """Start the plugins. When one fails, those before it are shut down and PluginError is raised."""
        for plugin in self.plugins:
            try:
                self._call(plugin, "startup", context=context, section=plugin.section)
            except StartError:
                self.shutdown(context)
                raise
            self._started.append(plugin)

    def shutdown(self, context: ServerContext) -> None:
        """Shut down what was started, last first. Never raises."""
        while self._started:
            self._observe(self._started.pop(), "shutdown", context=context)

    def readiness_checks(self, context: ServerContext) -> list[str]:
        """What keeps the plugins from being ready, a sentence each, beginning with the plugin's name. Never raises."""
        return [f"{plugin.origin.plugin}: {why}" for plugin in self.plugins for why in self._not_ready(plugin, context)]

    def request_finished(self, summary: RequestSummary) -> None:
        """Tell the plugins. Never raises."""
        for plugin in self.plugins:
            self._observe(plugin, "request_finished", summary=summary)

    def _not_ready(self, plugin: Plugin, context: ServerContext) -> list[str]:
        try:
            answers = self._call(plugin, "readiness_checks", context=context)
            return [why for answer in answers for why in ([answer] if isinstance(answer, str) else answer or ())]
        except Exception as error:
            log.error("%s failed in readiness_checks", plugin.origin, exc_info=error)
            return ["its readiness check failed; the log says how"]

    def _observe(self, plugin: Plugin, hook: str, **arguments: Any) -> None:
        if hook in plugin.hooks:
            try:
                plugin.hooks[hook](**arguments)
            except Exception:
                log.exception("%s failed in %s", plugin.origin, hook)


def _trace_call(hook: str, implementations: Sequence[pluggy.HookImpl], arguments: Mapping[str, Any]) -> None:
    names = ", ".join(implementation.plugin_name for implementation in implementations) or "nobody"
    print(f"hook {hook}({', '.join(arguments)}) -> {names}", file=sys.stderr, flush=True)


def _trace_result(
    outcome: pluggy.Result[Any], hook: str, implementations: Sequence[pluggy.HookImpl], arguments: Mapping[str, Any]
) -> None:
    # Types only: values may be somebody's identity or settings.
    error = outcome.exception
    result = f"raised {type(error).__name__}" if error else f"gave {_kind(outcome.get_result())}"
    print(f"hook {hook} {result}", file=sys.stderr, flush=True)


def _kind(result: Any) -> str:
    if isinstance(result, list):
        return f"[{', '.join(_kind(item) for item in result)}]"
    return "None" if result is None else type(result).__name__
