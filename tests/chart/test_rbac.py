"""The operator's rights are exactly those in docs/guides/security.md."""

from __future__ import annotations

import re
from typing import Any

import pytest

from chart import ROOT, SETS, one

#: Role in each namespace of pools, if they are listed.
_OF_POOLS = "kvcachepool-operator-pools"
#: (where pools are, API group, resource, name or "", verb)
Right = tuple[bool, str, str, str, str]


def _documented(values: dict[str, Any]) -> set[Right]:
    """Rights that the table of docs/guides/security.md grants with these values."""
    values = {"allowPodEviction": True} | values
    rights: set[Right] = set()
    if not values.get("rbac", {}).get("create", True):
        return rights
    for line in (ROOT / "docs" / "guides" / "security.md").read_text().splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if len(cells) != 7 or cells[0] not in ("all namespaces", "own namespace"):
            continue
        where, group, resource, name, verbs, when, why = cells
        assert why, line
        mode = values.get("pki", {}).get("mode", "self")
        if when == "always" or when == f"pki.mode: {mode}" or values.get(when) is True:
            group = "" if group == "core" else group
            rights |= {(where == "all namespaces", group, resource, name, verb) for verb in re.split(r",\s*", verbs)}
    return rights


def _rendered(objects: list[dict[str, Any]]) -> set[Right]:
    """Rights of the operator's ServiceAccount in the rendered chart."""
    account = one(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"]
    rights: set[Right] = set()
    for binding in objects:
        if binding["kind"] not in ("ClusterRoleBinding", "RoleBinding"):
            continue
        subject = {"kind": "ServiceAccount", "name": account, "namespace": "kv"}
        assert binding["subjects"] == [subject]
        everywhere = binding["kind"] == "ClusterRoleBinding"
        namespace = binding["metadata"].get("namespace")
        beside = [o for o in objects if o["metadata"].get("namespace") == namespace]
        role = one(beside, binding["roleRef"]["kind"], binding["roleRef"]["name"])
        assert everywhere or role["kind"] == "Role", "a ClusterRole bound in a namespace would be counted wrongly"
        everywhere |= role["metadata"]["name"] == _OF_POOLS
        for rule in role["rules"]:
            assert set(rule) <= {"apiGroups", "resources", "resourceNames", "verbs"}
            rights |= {
                (everywhere, group, resource, name, verb)
                for group in rule["apiGroups"]
                for resource in rule["resources"]
                for name in rule.get("resourceNames", [""])
                for verb in rule["verbs"]
            }
    return rights


@pytest.mark.parametrize("name", SETS)
def test_the_operator_has_exactly_the_rights_of_the_table(render, name):
    assert _rendered(render(SETS[name])) == _documented(SETS[name])


@pytest.mark.parametrize("name", SETS)
def test_no_wildcards_and_no_secrets_of_others(render, name):
    for everywhere, group, resource, only, verb in _rendered(render(SETS[name])):
        assert "*" not in (group, resource, verb)
        assert verb not in ("escalate", "bind", "impersonate")
        if resource == "secrets" and everywhere:
            assert verb == "create", "secrets of other namespaces are never read"
        elif resource == "secrets":
            assert verb in ("get", "update", "patch", "create")
            assert only == "kvcachepool-webhook-ca" or verb == "create", "any secret of the own namespace"


def test_listed_namespaces_have_a_role_each_and_the_cluster_role_almost_nothing(render):
    objects = render(SETS["two namespaces"])
    for kind in ("Role", "RoleBinding"):
        found = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == _OF_POOLS]
        assert [o["metadata"]["namespace"] for o in found] == ["serving", "kv"]
    rules = one(objects, "ClusterRole", "kvcachepool-operator")["rules"]
    assert [rule["resources"] for rule in rules] == [["mutatingwebhookconfigurations"]]
    selector = one(objects, "MutatingWebhookConfiguration")["webhooks"][0]["namespaceSelector"]["matchExpressions"]
    own = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["serving", "kv"]}
    assert own in selector
    environ = {
        e["name"]: e.get("value")
        for e in one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert environ["KVCACHEPOOL_WATCH_NAMESPACES"] == "serving,kv"


def test_optional_rights_are_off_by_default(render):
    rights = {(resource, verb) for _, _, resource, _, verb in _rendered(render())}
    off = {("pods", "patch"), ("podmonitors", "create")}
    off |= {("kvcachepools", "patch"), ("jobs", "create")}
    assert not rights & (off | {("statefulsets", "create"), ("services", "create"), ("networkpolicies", "create")})
    assert not any(everywhere and resource == "secrets" for everywhere, _, resource, _, _ in _rendered(render()))


def test_hanging_pods_are_replaced_unless_the_right_is_missing(render):
    rights = {("pods/eviction", "create"), ("pods", "delete")}
    for values, granted in (({}, rights), ({"allowPodEviction": False}, set())):
        assert {(resource, verb) for _, _, resource, _, verb in _rendered(render(values))} & rights == granted


def test_users_get_pools_by_their_roles(render):
    objects = render()
    view, edit = one(objects, "ClusterRole", "kvcachepool-view"), one(objects, "ClusterRole", "kvcachepool-edit")
    aggregated = "rbac.authorization.k8s.io/aggregate-to-{}".format
    for role, to in ((view, ("view", "edit", "admin")), (edit, ("edit", "admin"))):
        assert all(role["metadata"]["labels"].get(aggregated(one_of)) == "true" for one_of in to)
        assert all(rule["apiGroups"] == ["kvcachepool.io"] for rule in role["rules"])
    assert aggregated("view") not in edit["metadata"]["labels"]
    assert {verb for rule in view["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    # Only the operator writes status.
    assert {r for rule in edit["rules"] for r in rule["resources"]} == {"kvcachepools"}
