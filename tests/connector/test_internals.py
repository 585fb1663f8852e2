"""The names of vLLM that the connector uses are in one list, and a missing one turns the cache off by name."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.distributed.kv_transfer.kv_connector.v1 import base

import kvcachepool
from kvcachepool import plugin
from kvcachepool.connector import KVCachePoolConnector
from kvcachepool.internals import NEEDED, OPTIONAL, changed_internals
from servers.versions import newest

#: The connector's own methods, which vLLM's base class need not have.
_EXTRA = {"adapter_loaded", "arrive", "bugs", "kv_cache_restored", "kv_cache_released", "off_reason", "weights_changed"}
_EXTRA |= {"adapter_read_begins", "adapter_read_ended", "step_failed"}


def test_this_vllm_has_all_needed_names() -> None:
    assert changed_internals() is None


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NEEDED.items() for name in names])
def test_missing_names_are_reported(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, _, attribute = name.partition(".")
    found = importlib.import_module(module)
    if attribute:
        rest = {one.partition(".")[2] for one in NEEDED[module] if one.startswith(f"{owner}.")} - {attribute}
        monkeypatch.setattr(found, owner, type(owner, (), dict.fromkeys(rest, 1)))
    else:
        monkeypatch.delattr(found, owner)
    assert changed_internals() == f"VllmInternalsChanged/{name}"


def test_a_missing_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NEEDED, "vllm.no_such_module", ("x",))
    assert changed_internals() == "VllmInternalsChanged/vllm.no_such_module"


def test_the_plugin_sets_no_connector_in_an_unsupported_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    monkeypatch.setitem(NEEDED, "vllm.v1.request", ("Request.no_such_field",))
    given = SimpleNamespace(kv_transfer_config=None, kv_offloading_size=None, prefix_caching_hash_algo="sha256")
    assert plugin._choose(given) == (None, "VllmInternalsChanged/Request.no_such_field")


def test_every_import_from_vllm_is_listed() -> None:
    listed = {
        (module, name.partition(".")[0])
        for table in (NEEDED, OPTIONAL)
        for module, names in table.items()
        for name in names
    }
    unlisted = []
    for file in sorted(Path(kvcachepool.__file__).parent.glob("*.py")):
        if file.name.startswith(("vllm_tier", "tier_")):
            continue  # not of the connector: vLLM loads the tier by itself, which refuses a vLLM that is too old
        tree = ast.parse(file.read_text())
        for_types = {
            id(node)
            for block in ast.walk(tree)
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for node in ast.walk(block)
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ImportFrom)
                and id(node) not in for_types
                and (node.module or "").startswith("vllm")
            ):
                unlisted += [
                    f"{file.name}: from {node.module} import {one.name}"
                    for one in node.names
                    if (node.module, one.name) not in listed
                ]
    assert unlisted == []


def test_every_public_method_of_the_connector_is_a_hook_of_vllm_or_listed() -> None:
    unknown = {
        name
        for name in vars(KVCachePoolConnector)
        if not name.startswith("_")
        and not hasattr(base.KVConnectorBase_V1, name)
        and not hasattr(base.SupportsHMA, name)
    }
    assert unknown <= _EXTRA | (set() if newest() else {"get_external_cache_hit_sources"})
