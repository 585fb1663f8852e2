"""What the API server accepts as a pool: the table of the operator's own rules, and the rules of types."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import reduce
from typing import Any

import pytest

from cluster.kubernetes import Kubernetes, Object, Refused
from cluster.product import Operator, pool
from servers.paths import ROOT

_TABLE = json.loads((ROOT / "operator" / "tests" / "rules.json").read_text())


@pytest.fixture(scope="module")
def pools(kubernetes: Kubernetes, operator: Operator) -> Iterator[str]:
    """Path of the pools in a namespace for all tests of this file. Most of them are dry runs."""
    kubernetes.create_namespace("schema")
    yield "/apis/kvcachepool.io/v1alpha1/namespaces/schema/kvcachepools"
    kubernetes.delete_namespace("schema")


def _with(field: str, value: object, spec: str = "smallest") -> Object:
    """A pool of the table with this value in the field."""
    made = pool("llama") | {"spec": copy.deepcopy(_TABLE["specs"][spec])}
    *way, last = field.split(".")
    reduce(lambda at, name: at.setdefault(name, {}), way, made)[last] = value
    return made


def _broken(kubernetes: Kubernetes, method: str, path: str, made: Object) -> set[tuple[str, str]]:
    """Field and message of all violations that the API server reports for a pool, by dry run."""
    try:
        kubernetes.request(method, f"{path}?dryRun=All", made)
    except Refused as refused:
        answer = json.loads(str(refused).split(": ", 2)[2])
        # The whole object has no path.
        return {(cause["field"].replace("<nil>", ""), cause["message"]) for cause in answer["details"]["causes"]}
    return set()


@pytest.mark.parametrize("case", _TABLE["cases"], ids=lambda case: f"{case['field']} at {case['rule'] or 'the root'}")
def test_a_field_accepts_valid_values_and_explains_invalid_ones(kubernetes: Kubernetes, pools: str, case: Any) -> None:
    refused = {}
    for value in case["good"]:
        broken = _broken(kubernetes, "POST", pools, _with(case["field"], value, case["spec"]))
        if broken:
            refused[json.dumps(value)] = broken
    assert refused == {}
    for value in case["bad"]:
        broken = _broken(kubernetes, "POST", pools, _with(case["field"], value, case["spec"]))
        # The value precedes the rule's message.
        refusals = {(field, message.endswith(f": {case['message']}")) for field, message in broken}
        assert refusals == {(case["rule"], True)}, f"{value!r}: {broken}"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("spec.local", {}, "spec.local.memory: Required value"),
        ("spec.local.memory", {}, "spec.local.memory.perPod: Required value"),
        ("spec.local.memory.perPod", 1.5, 'spec.local.memory.perPod: Invalid value: "number"'),
        ("spec.local.memory.perPod", "1" * 64, "spec.local.memory.perPod: Too long"),
        ("spec.local.memory.hugePages", "4Mi", 'supported values: "None", "2Mi", "1Gi"'),
        ("spec.cache.chunkTokens", "256", "spec.cache.chunkTokens in body must be of type integer"),
        ("spec.cache.save", "Always", 'supported values: "Prompt", "PromptAndDecode", "None"'),
        ("spec.injection.onMissed", "evict", 'supported values: "Report", "Evict"'),
    ],
)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_field(
    kubernetes: Kubernetes, pools: str, field: str, value: object, message: str
) -> None:
    with pytest.raises(Refused) as refused:
        kubernetes.request("POST", f"{pools}?dryRun=All", _with(field, value))
    assert message in json.loads(str(refused.value).split(": ", 2)[2])["message"]


def test_an_unknown_field_is_refused_by_name(kubernetes: Kubernetes, pools: str) -> None:
    made = _with("spec.local.memory.size", "64Gi")
    with pytest.raises(Refused, match=r'unknown field \\"spec.local.memory.size\\"'):
        kubernetes.request("POST", f"{pools}?dryRun=All&fieldValidation=Strict", made)


def test_managed_and_external_redis_are_not_exchanged_in_one_step(kubernetes: Kubernetes, pools: str) -> None:
    at = f"{pools}/llama"
    stored = kubernetes.request("POST", pools, _with("spec.deletionPolicy", "Retain", "full"))
    managed, none = copy.deepcopy(stored), copy.deepcopy(stored)
    managed["spec"]["shared"]["redis"] = _TABLE["specs"]["managed"]["shared"]["redis"]
    del none["spec"]["shared"]["redis"]
    ((field, message),) = _broken(kubernetes, "PUT", at, managed)
    assert field == "spec.shared.redis"
    assert "remove spec.shared.redis, apply, then add it again" in message
    between = kubernetes.request("PUT", at, none)
    managed["metadata"]["resourceVersion"] = between["metadata"]["resourceVersion"]
    assert _broken(kubernetes, "PUT", at, managed) == set()
