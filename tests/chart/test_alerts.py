"""Alerts: Prometheus's own rule tests say when each one fires, and values change or remove it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from chart import CHART, ROOT, one

RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
SETTINGS: dict[str, dict[str, Any]] = yaml.safe_load((CHART / "values.yaml").read_text())["monitoring"]["alerts"][
    "rules"
]
POD = 'namespace="ns",pod="p"'
OF_POOL = 'namespace="ns",kvcachepool_io_pool="llama"'
SIDECAR = f'{OF_POOL},pod="p"'
TIER = f'{OF_POOL},tier="redis"'
NAMED = 'namespace="ns",pool="demo"'
DEMO = {"namespace": "ns", "pool": "demo"}
POOL = {"namespace": "ns", "kvcachepool_io_pool": "llama"}


class Case(NamedTuple):
    """Series, as promtool writes them, that fire an alert at a minute, and similar ones that do not."""

    fires: dict[str, str]
    silent: dict[str, str]
    minute: int
    labels: dict[str, str]
    summary: str


def _both(series: str, fires: str, silent: str) -> tuple[dict[str, str], dict[str, str]]:
    return {series: fires}, {series: silent}


CASES = {
    "KVCachePoolSidecarDegraded": Case(
        *_both(f'kvcachepool_degraded{{{SIDECAR},reason="config_invalid"}}', "1x20", "1x5 0x20"),
        11,
        {**POOL, "pod": "p", "reason": "config_invalid"},
        "The sidecar of ns/p (pool llama) serves less than configured: config_invalid",
    ),
    "KVCachePoolEngineDown": Case(
        *_both(f"kvcachepool_engine_up{{{SIDECAR}}}", "0x20", "0x3 1x20"),
        6,
        {**POOL, "pod": "p"},
        "The cache engine of ns/p (pool llama) does not run",
    ),
    "KVCachePoolCorruptChunks": Case(
        *_both(f"kvcachepool_corrupt_chunks_total{{{SIDECAR}}}", "0 0 1x20", "1x20"),
        5,
        {**POOL, "pod": "p"},
        "Cached bytes in ns/p (pool llama) do not match their digest",
    ),
    "KVCachePoolEngineRestarts": Case(
        *_both(f"kvcachepool_engine_starts_total{{{SIDECAR}}}", "1+1x30", "1+1x2 3x30"),
        10,
        {**POOL, "pod": "p"},
        "The cache engine of ns/p (pool llama) restarts repeatedly",
    ),
    "KVCachePoolCopiesStuck": Case(
        *_both(f"kvcachepool_oldest_copy_job_seconds{{{SIDECAR}}}", "31x5", "30x5"),
        3,
        {**POOL, "pod": "p"},
        "A copy between vLLM and its cache in ns/p (pool llama) does not end",
    ),
    "KVCachePoolRestartNeeded": Case(
        {f'kvcachepool_config_restart_needed{{{OF_POOL},key="socket",pod="{pod}"}}': "1x70" for pod in "ab"},
        {f'kvcachepool_config_restart_needed{{{OF_POOL},key="socket"}}': "1x30 _x40"},
        62,
        {**POOL, "key": "socket"},
        "2 sidecars of pool ns/llama need a restart for socket",
    ),
    "KVCachePoolTierDown": Case(
        *_both(f'kvcachepool_tier_down{{{TIER},reason="timeout"}}', "1x10", "1x3 0x10"),
        6,
        {**POOL, "tier": "redis", "reason": "timeout"},
        "redis of pool ns/llama is down for 1 sidecars: timeout",
    ),
    "KVCachePoolTierDegraded": Case(
        *_both(f'kvcachepool_tier_degraded{{{TIER},reason="slow"}}', "1 0 0 0 1x20", "1 0x20"),
        16,
        {**POOL, "tier": "redis", "reason": "slow"},
        "redis of pool ns/llama is degraded for 1 sidecars: slow",
    ),
    "KVCachePoolTierPaused": Case(
        *_both(f'kvcachepool_tier_breaker_open{{{TIER},operations="reads"}}', "0x3 1x10", "0x6 1x10"),
        10,
        {**POOL, "tier": "redis", "operations": "reads"},
        "1 sidecars of pool ns/llama have paused their reads of redis",
    ),
    "KVCachePoolTierObjectsUnusable": Case(
        *_both(f"kvcachepool_tier_corrupt_objects_total{{{TIER}}}", "0 1x10", "1x10"),
        5,
        {**POOL, "tier": "redis"},
        "Objects in redis of pool ns/llama were corrupt",
    ),
    "KVCachePoolTierObjectsForeign": Case(
        *_both(f'kvcachepool_tier_operations_total{{{TIER},result="foreign"}}', "0+1x80", "0+1x20 20x80"),
        65,
        {**POOL, "tier": "redis"},
        "redis of pool ns/llama holds foreign objects",
    ),
    "KVCachePoolTierWritesDropped": Case(
        {
            f'kvcachepool_tier_write_chunks_total{{{TIER},result="queue_full"}}': "0+1x40",
            f'kvcachepool_tier_write_chunks_total{{{TIER},result="stored"}}': "0+3x40",
        },
        {
            f'kvcachepool_tier_write_chunks_total{{{TIER},result="full"}}': "0+1x40",
            f'kvcachepool_tier_write_chunks_total{{{TIER},result="stored"}}': "0+4x40",
        },
        30,
        {**POOL, "tier": "redis"},
        "25% of the chunks for redis of pool ns/llama are dropped",
    ),
    "KVCachePoolLoadsSlow": Case(
        {
            f'kvcachepool_loads_total{{{OF_POOL},outcome="slower"}}': "0+3x70",
            f'kvcachepool_loads_total{{{OF_POOL},outcome="quicker"}}': "0+1x70",
        },
        {
            f'kvcachepool_loads_total{{{OF_POOL},outcome="slower"}}': "0+1x70",
            f'kvcachepool_loads_total{{{OF_POOL},outcome="quicker"}}': "0+1x70",
        },
        60,
        POOL,
        "75% of the loads of pool ns/llama take longer than recomputing",
    ),
    "KVCachePoolOperatorDown": Case(
        {f"kvcachepool_operator_build_info{{{POD}}}": "1 stale"},
        {f"kvcachepool_operator_build_info{{{POD}}}": "_x3 1x20"},
        7,
        {},
        "No replica of the operator is scraped",
    ),
    "KVCachePoolOperatorNotReady": Case(
        {f'kvcachepool_operator_ready{{pod="{pod}",part="certificate"}}': "0x20" for pod in "ab"},
        {f'kvcachepool_operator_ready{{pod="{pod}",part="certificate"}}': f"{int(pod == 'a')}x20" for pod in "ab"},
        6,
        {"part": "certificate"},
        "No replica of the operator is ready: certificate",
    ),
    "KVCachePoolNoLeader": Case(
        {f'kvcachepool_leader{{pod="{pod}"}}': "0x20" for pod in "ab"},
        {f'kvcachepool_leader{{pod="{pod}"}}': f"{int(pod == 'a')}x20" for pod in "ab"},
        3,
        {},
        "No replica of the operator reconciles",
    ),
    "KVCachePoolTwoLeaders": Case(
        {f'kvcachepool_leader{{pod="{pod}"}}': "1x20" for pod in "ab"},
        {'kvcachepool_leader{pod="a"}': "1x20", 'kvcachepool_leader{pod="b"}': "0 1 0x20"},
        3,
        {},
        "2 replicas of the operator reconcile at once",
    ),
    "KVCachePoolWebhookUnreachable": Case(
        *_both(f'kvcachepool_canary_checks_total{{{POD},result="webhook_unreachable"}}', "0+1x20", "0 1 2x20"),
        10,
        {"namespace": "ns", "pod": "p", "result": "webhook_unreachable"},
        "The API server does not reach the injection webhook",
    ),
    "KVCachePoolWebhookSlow": Case(
        {
            'kvcachepool_injection_seconds_bucket{le="1"}': "0+1x40",
            'kvcachepool_injection_seconds_bucket{le="2"}': "0+2x40",
            'kvcachepool_injection_seconds_bucket{le="+Inf"}': "0+2x40",
        },
        {
            'kvcachepool_injection_seconds_bucket{le="1"}': "0+2x40",
            'kvcachepool_injection_seconds_bucket{le="+Inf"}': "0+2x40",
        },
        30,
        {},
        "1% of the new pods wait 1.98s or longer for the injection webhook",
    ),
    "KVCachePoolCertificateEnds": Case(
        *_both('kvcachepool_certificate_expiry_timestamp_seconds{certificate="leaf"}', "7200x20", "22200x20"),
        10,
        {"certificate": "leaf"},
        "The webhook's certificate (leaf) expires in 1h 50m 0s and was not renewed",
    ),
    "KVCachePoolReconcileFailures": Case(
        *_both(f'kvcachepool_reconciles_total{{{POD},result="failed"}}', "0+1x60", "0+1x3 3x60"),
        40,
        {},
        "15 reconcile passes failed within 15 minutes",
    ),
    "KVCachePoolWatchErrors": Case(
        *_both(f'kvcachepool_watch_errors_total{{{POD},kind="pod"}}', "0+1x60", "0+0.3x60"),
        40,
        {"kind": "pod"},
        "The operator's watch of pod fails repeatedly",
    ),
    "KVCachePoolSidecarsUnreachable": Case(
        {
            'kvcachepool_sidecar_questions_total{result="failed"}': "0+3x60",
            'kvcachepool_sidecar_questions_total{result="answered"}': "0+1x60",
        },
        {
            'kvcachepool_sidecar_questions_total{result="failed"}': "0+1x60",
            'kvcachepool_sidecar_questions_total{result="answered"}': "0+1x60",
        },
        50,
        {},
        "75% of the operator's queries of sidecars fail",
    ),
    "KVCachePoolsInvalid": Case(
        {f'kvcachepool_pools_invalid{{pod="{pod}"}}': "2x20" for pod in "ab"},
        {f'kvcachepool_pools_invalid{{pod="{pod}"}}': "0x20" for pod in "ab"},
        6,
        {},
        "2 stored pools cannot be read by this operator",
    ),
    "KVCachePoolNotReady": Case(
        *_both(f'kvcachepool_pool_condition{{{NAMED},condition="ready"}}', "0x20", "0x5 1x20"),
        16,
        DEMO,
        "The pool ns/demo is not ready",
    ),
    "KVCachePoolInjectionPaused": Case(
        *_both(f"kvcachepool_pool_injection_paused{{{NAMED}}}", "2x5", "0x5"),
        3,
        DEMO,
        "Injection is paused for 2 owners of pods of the pool ns/demo",
    ),
    "KVCachePoolPodsMissed": Case(
        *_both(f'kvcachepool_pool_pods{{{NAMED},state="missed"}}', "3x20", "3x5 0x20"),
        16,
        DEMO,
        "3 pods of the pool ns/demo were created without a sidecar",
    ),
    "KVCachePoolPodsNotAttached": Case(
        {
            f'kvcachepool_pool_pods{{{NAMED},state="injected"}}': "4x40",
            f'kvcachepool_pool_pods{{{NAMED},state="attached"}}': "3x40",
        },
        {
            f'kvcachepool_pool_pods{{{NAMED},state="injected"}}': "4x40",
            f'kvcachepool_pool_pods{{{NAMED},state="attached"}}': "3x20 4x20",
        },
        35,
        DEMO,
        "1 pods of the pool ns/demo have a sidecar that vLLM does not use",
    ),
    "KVCachePoolManagedServersDown": Case(
        {
            f'kvcachepool_pool_managed_servers{{{NAMED},state="desired"}}': "3x20",
            f'kvcachepool_pool_managed_servers{{{NAMED},state="ready"}}': "1x20",
        },
        {
            f'kvcachepool_pool_managed_servers{{{NAMED},state="desired"}}': "3x20",
            f'kvcachepool_pool_managed_servers{{{NAMED},state="ready"}}': "1x5 3x20",
        },
        12,
        DEMO,
        "2 managed servers of the pool ns/demo are not ready",
    ),
}


def _rendered(render: Any, **alerts: Any) -> dict[str, dict[str, Any]]:
    """Rules by name, as the chart gives them to Prometheus."""
    rule = one(render({"monitoring": {"alerts": {"enabled": True, **alerts}}}), "PrometheusRule")
    return {rule["alert"]: rule for group in rule["spec"]["groups"] for rule in group["rules"]}


def _evaluate(promtool: Any, rules: dict[str, dict[str, Any]], tests: list[dict[str, Any]], folder: Path) -> None:
    """Prometheus's answers to these tests, of the summaries alone."""
    kept = [{**rule, "annotations": {"summary": rule["annotations"]["summary"]}} for rule in rules.values()]
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": kept}]}))
    whole = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (folder / "tests.yaml").write_text(yaml.safe_dump(whole))
    done = promtool("test", "rules", str(folder / "tests.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


def _firing(name: str, case: Case, cluster: str = "") -> dict[str, Any]:
    labels = {**case.labels, "severity": SETTINGS[name]["severity"], **({"cluster": cluster} if cluster else {})}
    return {"exp_labels": labels, "exp_annotations": {"summary": case.summary}}


def _of(cluster: str, series: str) -> str:
    """A series with the label `cluster`."""
    return series.replace("{", f'{{cluster="{cluster}",') if cluster else series


@pytest.mark.parametrize(
    "clusters",
    [{"": True}, {"": False}, {"a": False, "b": True}, {"a": False, "b": False}],
    ids=["fires", "is silent", "fires for one of two clusters", "is silent for two clusters"],
)
def test_every_alert_as_prometheus_evaluates_it(promtool, render, tmp_path, clusters):
    rules = _rendered(render)
    assert list(rules) == list(CASES)
    tests = []
    for name, case in CASES.items():
        series = [
            {"series": _of(cluster, series), "values": values}
            for cluster, fires in clusters.items()
            for series, values in (case.fires if fires else case.silent).items()
        ]
        firing = [_firing(name, case, cluster) for cluster, fires in clusters.items() if fires]
        expected = {"eval_time": f"{case.minute}m", "alertname": name, "exp_alerts": firing}
        tests.append({"name": name, "interval": "1m", "input_series": series, "alert_rule_test": [expected]})
    _evaluate(promtool, rules, tests, tmp_path)


def test_an_operator_is_down_that_was_never_scraped(promtool, render, tmp_path):
    name = "KVCachePoolOperatorDown"
    expected = {"eval_time": "6m", "alertname": name, "exp_alerts": [_firing(name, CASES[name])]}
    _evaluate(promtool, _rendered(render), [{"interval": "1m", "alert_rule_test": [expected]}], tmp_path)


@pytest.mark.parametrize(
    ("pki", "threshold"),
    [
        ({"mode": "self"}, 21600),
        ({"mode": "cert-manager"}, 604800),
        ({"mode": "external", "external": {"secretName": "tls"}}, 604800),
    ],
)
def test_a_certificate_with_a_long_life_is_reported_earlier(render, pki, threshold):
    for values, wanted in ({}, threshold), ({"threshold": 3600}, 3600):
        alerts = {"enabled": True, "rules": {"KVCachePoolCertificateEnds": values}}
        rule = one(render({"pki": pki, "monitoring": {"alerts": alerts}}), "PrometheusRule")
        (found,) = re.findall(r"certificate_expiry.* < (\d+)'", str(rule))
        assert int(found) == wanted


def test_every_alert_has_settings_and_a_threshold_where_it_compares_with_one():
    assert list(SETTINGS) == [rule["alert"] for rule in RULES]
    for rule in RULES:
        assert ("threshold" in SETTINGS[rule["alert"]]) == ("$threshold" in rule["expr"]), rule["alert"]


def test_an_alert_has_a_severity_and_a_section_in_the_runbook(render):
    page = (ROOT / "docs" / "guides" / "alerts.md").read_text()
    for name, rule in _rendered(render).items():
        assert rule["labels"] == {"severity": SETTINGS[name]["severity"]}
        assert "runbook_url" not in rule["annotations"], "its address is not known"
        assert f"\n### {name}\n" in page
        assert "$threshold" not in str(rule)


def test_values_change_and_remove_single_alerts(render):
    rules = _rendered(
        render,
        labels={"release": "prom"},
        runbookUrl="https://docs.example/alerts.html",
        alertLabels={"team": "ml", "severity": "page"},
        rules={
            "KVCachePoolTierDown": {"threshold": 3, "for": "1h", "severity": "critical"},
            "KVCachePoolLoadsSlow": {"enabled": False},
        },
    )
    assert set(CASES) - set(rules) == {"KVCachePoolLoadsSlow"}
    changed = rules["KVCachePoolTierDown"]
    assert changed["expr"].endswith("(kvcachepool_tier_down) > 3")
    assert changed["for"] == "1h"
    assert changed["labels"] == {"team": "ml", "severity": "critical"}
    assert changed["annotations"]["runbook_url"] == "https://docs.example/alerts.html#kvcachepooltierdown"


def test_a_group_without_alerts_is_left_out(render):
    tiers = [name for name in CASES if re.search("Pool(Tier|Loads)", name)]
    alerts = {"enabled": True, "labels": {"release": "prom"}, "rules": {name: {"enabled": False} for name in tiers}}
    rule = one(render({"monitoring": {"alerts": alerts}}), "PrometheusRule")
    assert [group["name"] for group in rule["spec"]["groups"]] == [
        "kvcachepool-sidecars",
        "kvcachepool-operator",
        "kvcachepool-pools",
    ]
    assert rule["metadata"]["labels"]["release"] == "prom"


def test_every_label_of_an_alerts_text_is_one_of_its_result():
    for rule in RULES:
        texts = " ".join(rule["annotations"].values())
        used = set(re.findall(r"\$labels\.(\w+)", texts))
        by = {label.strip() for part in re.findall(r"\bby \(([^)]*)\)", rule["expr"]) for label in part.split(",")}
        assert used <= (by or {"namespace", "pod", "kvcachepool_io_pool"}), rule["alert"]
