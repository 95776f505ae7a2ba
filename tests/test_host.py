"""The plugin host, with throwaway distributions beside the project's own plugins' absence."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from rwkv_lightning.core import hookspecs
from rwkv_lightning.core.config import load_settings
from rwkv_lightning.core.discovery import discover
from rwkv_lightning.core.errors import PluginError, SettingsError, Unauthorized
from rwkv_lightning.core.host import PluginHost
from rwkv_lightning.core.interfaces import SamplerContext
from rwkv_lightning.core.listing import as_table, listings

CONTEXT: Any = object()
SAMPLER = """
    @hookimpl
    def register_samplers(register):
        register("Min-P", lambda context: ("sampler", context.vocab_size), "keeps likely tokens")
"""
ROUTES = """
    from fastapi import APIRouter
    from rwkv_lightning.core.interfaces import BodyClaim, RouteGroup

    router = APIRouter()

    @router.{method}("{path}")
    def endpoint(): ...

    @hookimpl
    def register_routes(register):
        register(RouteGroup("{name}", router, render_error=None))
"""
CLAIM = """
    from fastapi import APIRouter
    from rwkv_lightning.core.interfaces import BodyClaim, RouteGroup

    @hookimpl
    def register_routes(register):
        claim = BodyClaim("POST", "/v9/chat", "{key}", "a body", handle=None, body_schema={{}}, fallback={fallback})
        register(RouteGroup("{name}", APIRouter(), render_error=None, claims=[claim]))
"""


def host_of(*plugins: str, **options: Any) -> PluginHost:
    """A host of these plugins and none of the project's own."""
    found = [plugin for plugin in discover() if not plugin.own]
    return PluginHost(load_settings({"plugin": list(plugins), **options}), found)


def test_a_named_plugin_is_loaded_and_keeps_its_origin(install_plugin: Any) -> None:
    install_plugin("min-p", SAMPLER)
    host = host_of("MIN-P")
    registered = host.samplers.get("mIn-P")
    assert (registered.name, registered.description) == ("min-p", "keeps likely tokens")
    assert str(registered.origin) == "plugin 'min-p' (acme-plugin 1.2)"
    samplers: dict[str, Any] = dict(host.create_samplers(SamplerContext(7, [])))
    assert samplers == {"min-p": ("sampler", 7)}


def test_the_environment_names_plugins_too(install_plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin("min-p", SAMPLER)
    monkeypatch.setenv("RWKV_LIGHTNING_PLUGIN", "min-p")
    assert [item.name for item in PluginHost(load_settings(), discover()[-1:]).samplers] == ["min-p"]


def test_an_installed_plugin_that_nobody_names_is_not_even_imported(install_plugin: Any) -> None:
    install_plugin("bomb", "raise RuntimeError('imported')")
    host = host_of()
    assert host.plugins == []
    (line,) = listings(host, "cpu")
    assert (line.kind, line.name, line.status) == ("plugin", "bomb", "available")
    assert (line.distribution, line.version, line.reason) == ("acme-plugin", "1.2", "--plugin bomb loads it")


def test_a_named_plugin_that_fails_stops_the_start_with_its_cause(install_plugin: Any) -> None:
    install_plugin("bomb", "raise RuntimeError('imported')")
    with pytest.raises(
        PluginError, match=r"plugin 'bomb' \(acme-plugin 1.2\) cannot be loaded: RuntimeError"
    ) as caught:
        host_of("bomb")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_hook_that_fails_at_start_stops_it_with_its_cause(install_plugin: Any) -> None:
    install_plugin("bomb", "@hookimpl\ndef register_backends(register): 1 / 0")
    with pytest.raises(PluginError, match="failed in register_backends: ZeroDivisionError") as caught:
        host_of("bomb")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("plugin", "disabled", "message"),
    [
        ("min-q", "", r"--plugin min-q: no such plugin is installed; did you mean min-p\?"),
        ("", "xyzzy", r"--disable-plugin xyzzy: no such plugin is installed; installed: .*min-p"),
        ("min-p", "min-p", r"--plugin min-p and --disable-plugin min-p contradict each other"),
    ],
)
def test_names_of_plugins_are_checked(install_plugin: Any, plugin: str, disabled: str, message: str) -> None:
    install_plugin("min-p", SAMPLER)
    with pytest.raises(SettingsError, match=message):
        host_of(plugin, disable_plugin=disabled)


def test_two_plugins_of_one_name(install_plugin: Any) -> None:
    install_plugin("min-p", SAMPLER, distribution="acme")
    install_plugin("min-p", SAMPLER, distribution="bolt")
    assert host_of().plugins == [], "while nobody names it, nothing is wrong"
    with pytest.raises(PluginError, match=r"\((acme|bolt) 1.2\) and .*\((acme|bolt) 1.2\) have the same name"):
        host_of("min-p")


def test_a_name_registered_twice_stops_the_start_naming_both(install_plugin: Any) -> None:
    install_plugin("first", SAMPLER, distribution="acme")
    install_plugin("second", SAMPLER.replace("Min-P", "MIN-p"), distribution="bolt", version="3")
    with pytest.raises(PluginError) as caught:
        host_of("first", "second")
    assert "sampler 'min-p' is registered twice" in str(caught.value)
    assert "plugin 'first' (acme 1.2)" in str(caught.value)
    assert "plugin 'second' (bolt 3)" in str(caught.value)


@pytest.mark.parametrize(
    ("first", "second", "place"),
    [
        (ROUTES.format(method="get", path="/a", name="x"), ROUTES.format(method="get", path="/a", name="y"), "GET /a"),
        (
            ROUTES.format(method="post", path="/s/{id}", name="x"),
            ROUTES.format(method="post", path="/s/{name}", name="y"),
            "POST /s/{}",
        ),
        (
            ROUTES.format(method="post", path="/v9/chat", name="x"),
            CLAIM.format(key="k", fallback=False, name="y"),
            "POST /v9/chat",
        ),
        (
            CLAIM.format(key="k", fallback=False, name="x"),
            CLAIM.format(key="k", fallback=False, name="y"),
            "POST /v9/chat for bodies with 'k'",
        ),
        (
            CLAIM.format(key="k", fallback=True, name="x"),
            CLAIM.format(key="l", fallback=True, name="y"),
            "POST /v9/chat as fallback",
        ),
        (
            ROUTES.format(method="get", path="/a", name="same"),
            ROUTES.format(method="get", path="/b", name="Same"),
            "route group 'same'",
        ),
    ],
)
def test_clashing_routes_stop_the_start_naming_both(install_plugin: Any, first: str, second: str, place: str) -> None:
    install_plugin("first", first, distribution="acme")
    install_plugin("second", second, distribution="bolt")
    with pytest.raises(PluginError) as caught:
        host_of("first", "second")
    assert str(caught.value).startswith(f"{place} is registered twice")
    assert "acme" in str(caught.value)
    assert "bolt" in str(caught.value)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ROUTES.format(method="get", path="/a", name="x"), ROUTES.format(method="post", path="/a", name="y")),
        (CLAIM.format(key="k", fallback=True, name="x"), CLAIM.format(key="l", fallback=False, name="y")),
    ],
)
def test_routes_that_only_look_alike_live_together(install_plugin: Any, first: str, second: str) -> None:
    install_plugin("first", first, distribution="acme")
    install_plugin("second", second, distribution="bolt")
    assert [group.name for group in host_of("first", "second").route_groups()] == ["x", "y"]


def test_routes_of_included_routers_count(install_plugin: Any) -> None:
    nested = ROUTES.format(method="get", path="/b", name="x").replace(
        "@hookimpl", 'outer = APIRouter()\n    outer.include_router(router, prefix="/a")\n\n    @hookimpl'
    )
    install_plugin("first", nested.replace('"x", router', '"x", outer'), distribution="acme")
    install_plugin("second", ROUTES.format(method="get", path="/a/b", name="y"), distribution="bolt")
    with pytest.raises(PluginError, match="GET /a/b is registered twice"):
        host_of("first", "second")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "@hookimpl\ndef register_sampler(register): ...",
            "hook 'register_sampler', .* did you mean 'register_samplers'",
        ),
        ("@hookimpl\ndef wash_dishes(): ...", "hook 'wash_dishes', which does not exist"),
        (
            "def register_samplers(register): ...\n" + "@hookimpl\ndef shutdown(): ...",
            "not marked .*'register_samplers'",
        ),
        (
            "def register_sampler(register): ...\n" + "@hookimpl\ndef shutdown(): ...",
            "not marked .*'register_samplers'",
        ),
        ("@hookimpl\nasync def startup(context): ...", "hook 'startup' is 'async def'"),
        ("@hookimpl\ndef startup(contxt): ...", "contxt"),
        ("x = 1", "implements no hook"),
    ],
)
def test_misspelt_hooks_stop_the_start(install_plugin: Any, source: str, message: str) -> None:
    install_plugin("sloppy", source)
    with pytest.raises(PluginError, match=message):
        host_of("sloppy")


def test_helpers_and_imports_are_not_taken_for_hooks(install_plugin: Any) -> None:
    source = """
        from rwkv_lightning.core.hookspecs import register_routes  # imported, not defined here

        def _register_backends(): ...

        def start_engine(): ...

        @hookimpl
        def shutdown(): ...
    """
    install_plugin("tidy", source)
    assert [plugin.origin.plugin for plugin in host_of("tidy").plugins] == ["tidy"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('register("a b", object, "")', r"backend named 'a b'; use letters"),
        ('register(3, object, "")', r"backend named 3; use letters"),
        ('register("a", "not callable", "")', r"the factory of backend 'a' is not callable"),
    ],
)
def test_what_is_registered_is_checked(install_plugin: Any, source: str, message: str) -> None:
    install_plugin("sloppy", f"@hookimpl\ndef register_backends(register): {source}")
    with pytest.raises(PluginError, match=message):
        host_of("sloppy")


def test_backends_are_made_by_name(install_plugin: Any) -> None:
    source = """
        @hookimpl
        def register_backends(register):
            register("good", dict, "works")
            register("bad", lambda: 1 / 0, "does not")
    """
    install_plugin("engines", source)
    host = host_of("engines")
    assert isinstance(host.create_backend("GOOD"), dict)
    with pytest.raises(
        SettingsError, match=r"--inference-engine: .* 'goood' \(known: good, bad\); did you mean good\?"
    ):
        host.create_backend("goood")
    with pytest.raises(PluginError, match=r"backend 'bad' of plugin 'engines' .* cannot be made: ZeroDivisionError"):
        host.create_backend("bad")


def test_sampler_factories_that_fail_are_named(install_plugin: Any) -> None:
    install_plugin("bomb", SAMPLER.replace('("sampler", context.vocab_size)', "1 / 0"))
    with pytest.raises(PluginError, match=r"sampler 'min-p' of plugin 'bomb' .* cannot be made: ZeroDivisionError"):
        host_of("bomb").create_samplers(SamplerContext(7, []))


def test_a_class_is_a_plugin_too(install_plugin: Any) -> None:
    folder = install_plugin("min-p", f"class Plugin:{SAMPLER.replace('(register)', '(self, register)')}")
    (declared,) = folder.glob("*.dist-info/entry_points.txt")
    declared.write_text(declared.read_text().strip() + ":Plugin\n")
    assert [item.name for item in host_of("min-p").samplers] == ["min-p"]


SETTINGS = """
    from pydantic import BaseModel, Field

    class Section(BaseModel):
        scale: float = Field(1.0, ge=0)

    @hookimpl
    def plugin_settings():
        return Section

    @hookimpl
    def register_backends(register, section):
        register("b", lambda: section.scale, "")
"""


def scale_of(host: PluginHost) -> Any:
    return host.create_backend("b")


def test_a_plugin_gets_its_own_settings(install_plugin: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_plugin("min-p", SETTINGS)
    assert scale_of(host_of("min-p")) == 1.0
    file = tmp_path / "server.toml"
    file.write_text("[plugins.min-p]\nscale = 2")
    assert scale_of(host_of("min-p", config=str(file))) == 2.0
    monkeypatch.setenv("RWKV_LIGHTNING_MIN_P__SCALE", "3")
    assert scale_of(host_of("min-p", config=str(file))) == 3.0


@pytest.mark.parametrize(
    ("section", "plugin", "message"),
    [
        ("[plugins.min-p]\nscael = 1", "min-p", r"scael in \[plugins.min-p\] \(RWKV_.*MIN_P__SCAEL\) .* mean scale\?"),
        ("[plugins.min-p]\nscale = -1", "min-p", r"scale in \[plugins.min-p\].*: input should be greater than"),
        ("[plugins.min-q]\nscale = 1", "min-p", r"\[plugins.min_q\] names no installed plugin; did you mean min_p\?"),
        ("[plugins.min-p]\nscale = 1", "", r"\[plugins.min_p\] is for a plugin that is not loaded; add --plugin min-p"),
        ("[plugins.plain]\nscale = 1", "plain", r"\[plugins.plain\]: plugin 'plain' has no settings"),
    ],
)
def test_sections_are_checked(install_plugin: Any, tmp_path: Path, section: str, plugin: str, message: str) -> None:
    install_plugin("min-p", SETTINGS, distribution="acme")
    install_plugin("plain", SAMPLER, distribution="bolt")
    (tmp_path / "server.toml").write_text(section)
    with pytest.raises(SettingsError, match=message):
        host_of(plugin, config=str(tmp_path / "server.toml"))


def test_a_disabled_plugin_may_keep_its_section(install_plugin: Any, tmp_path: Path) -> None:
    install_plugin("min-p", SETTINGS)
    (tmp_path / "server.toml").write_text("[plugins.min-p]\nscale = 1")
    assert host_of(disable_plugin="min-p", config=str(tmp_path / "server.toml")).plugins == []


LIFE = """
    LOG = []

    @hookimpl
    def startup(context, section):
        LOG.append("up"){up}

    @hookimpl
    def shutdown(context):
        LOG.append("down"){down}

    @hookimpl
    def request_finished(summary):
        LOG.append(summary){finished}
"""


def life(up: str = "", down: str = "", finished: str = "") -> str:
    return LIFE.format(**{k: f"; {v}" if v else "" for k, v in (("up", up), ("down", down), ("finished", finished))})


def log_of(name: str, distribution: str) -> list[Any]:
    log: list[Any] = sys.modules[f"{distribution}_{name}"].LOG
    return log


def test_life_cycle(install_plugin: Any, caplog: pytest.LogCaptureFixture) -> None:
    install_plugin("one", life(finished="1 / 0"), distribution="life1")
    install_plugin("two", life(down="1 / 0"), distribution="life2")
    host = host_of("one", "two")
    host.startup(CONTEXT)
    summary: Any = "summary"
    host.request_finished(summary)
    host.shutdown(CONTEXT)
    host.shutdown(CONTEXT)
    assert log_of("one", "life1") == log_of("two", "life2") == ["up", "summary", "down"]
    assert "plugin 'one' (life1 1.2) failed in request_finished" in caplog.text
    assert "plugin 'two' (life2 1.2) failed in shutdown" in caplog.text


def test_a_start_that_fails_shuts_down_what_was_started(install_plugin: Any) -> None:
    install_plugin("one", life(), distribution="half1")
    install_plugin("two", life(up="1 / 0"), distribution="half2")
    with pytest.raises(PluginError, match=r"plugin 'two' .* failed in startup: ZeroDivisionError"):
        host_of("one", "two").startup(CONTEXT)
    assert log_of("one", "half1") == ["up", "down"]
    assert log_of("two", "half2") == ["up"]


def test_authenticate_takes_the_first_answer(install_plugin: Any) -> None:
    ask: Any = None
    assert host_of().authenticate(ask) is None
    install_plugin("pass", "@hookimpl\ndef authenticate(request): return None", distribution="acme")
    install_plugin("know", "@hookimpl\ndef authenticate(request): return 'somebody'", distribution="bolt")
    assert host_of("pass").authenticate(ask) is None
    assert host_of("know", "pass").authenticate(ask) == "somebody"


def test_authenticate_may_refuse(install_plugin: Any) -> None:
    install_plugin(
        "wall",
        "from rwkv_lightning.core.errors import Unauthorized\n\n"
        "@hookimpl\ndef authenticate(request): raise Unauthorized('not today')",
    )
    ask: Any = None
    with pytest.raises(Unauthorized, match="not today"):
        host_of("wall").authenticate(ask)


def test_choose_backend(install_plugin: Any) -> None:
    install_plugin(
        "chooser",
        "@hookimpl\ndef choose_backend(settings, checkpoint):\n    return 'q4' if checkpoint.suffix == '.q4' else None",
    )
    host, settings = host_of("chooser"), load_settings()
    assert host.choose_backend(settings, Path("a.q4")) == "q4"
    assert host.choose_backend(settings, Path("a.pth")) == "fp16"


METRIC = """
    from prometheus_client import Counter

    @hookimpl
    def register_metrics(registry):
        Counter("dishes_washed", "How many", registry=registry)
"""


def test_metrics_of_plugins(install_plugin: Any) -> None:
    install_plugin("one", METRIC, distribution="acme")
    install_plugin("two", METRIC, distribution="bolt")
    registry = CollectorRegistry()
    host_of("one").register_metrics(registry)
    assert b"dishes_washed_total 0.0" in generate_latest(registry)
    with pytest.raises(PluginError, match=r"plugin 'two' .* failed in register_metrics: .*Duplicated"):
        host_of("two").register_metrics(registry)


def test_tracing_prints_hooks_but_no_values(install_plugin: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install_plugin("know", "@hookimpl\ndef authenticate(request): return 'somebody'")
    ask: Any = None
    host_of("know").authenticate(ask)
    assert capsys.readouterr().err == ""
    host_of("know", trace_plugins=True, password="correct horse").authenticate(ask)
    assert capsys.readouterr().err == "hook authenticate(request) -> know\nhook authenticate gave str\n"


def test_the_listing_says_what_works_here(install_plugin: Any) -> None:
    source = """
        class Works:
            def probe(self, device): return None

        class Needs:
            def probe(self, device): return f"needs a GPU, not {device}"

        @hookimpl
        def register_backends(register):
            register("works", Works, "always")
            register("needs", Needs, "sometimes")
            register("breaks", lambda: 1 / 0, "never")

        @hookimpl
        def shutdown(): ...
    """
    install_plugin("engines", source)
    lines = listings(host_of("engines"), "cpu")
    assert [(line.kind, line.name, line.status) for line in lines] == [
        ("backend", "works", "ready"),
        ("backend", "needs", "unusable"),
        ("backend", "breaks", "unusable"),
        ("hooks", "engines", "ready"),
    ]
    assert lines[1].reason == "needs a GPU, not cpu"
    assert "ZeroDivisionError" in lines[2].reason
    assert lines[3].description == "shutdown"
    table = as_table(lines).splitlines()
    assert len({line.index("acme-plugin") for line in table[1:]}) == 1, "columns line up"


def test_every_hook_is_described() -> None:
    hooks = {
        name: function for name, function in vars(hookspecs).items() if hasattr(function, f"{hookspecs.NAMESPACE}_spec")
    }
    assert len(hooks) == 12
    for name, function in hooks.items():
        assert len(inspect.getdoc(function) or "") > 60, name
        hints = [parameter.annotation for parameter in inspect.signature(function).parameters.values()]
        assert inspect.Parameter.empty not in hints, name


def test_the_projects_own_plugins_are_always_loaded() -> None:
    host = PluginHost(load_settings())
    assert {plugin.origin.distribution for plugin in host.plugins} == {"rwkv-lightning"}
    assert {item.name for item in host.backends} >= {"fp16"}
    assert {item.name for item in host.samplers} >= {"v1", "v2", "temperature"}
    assert {group.name for group in host.route_groups()} >= {"native", "service"}
    without = PluginHost(load_settings({"disable_plugin": ["V2"]}))
    assert {item.name for item in host.samplers} - {item.name for item in without.samplers} == {"v2"}
