"""Monitors; and every query of dashboard and alerts names metrics and labels of the tables under docs/."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
import yaml

from chart import CHART, ROOT, one

#: Labels that Prometheus adds, one that the PodMonitor of a pool adds, and the label of histogram buckets.
ADDED = {"cluster", "namespace", "pod", "kvcachepool_io_pool", "le"}


def _metrics() -> dict[str, set[str]]:
    """Labels by metric, from the tables that the code generates."""
    metrics = {}
    for page in ("metrics.md", "operator-metrics.md"):
        for line in (ROOT / "docs" / "reference" / page).read_text().splitlines():
            if row := re.match(r"^\| `(kvcachepool_\w+)` \| (\w+) \| ([^|]*) \|", line):
                names = [row[1]] if row[2] != "histogram" else [row[1] + end for end in ("_bucket", "_sum", "_count")]
                metrics.update({name: set(re.findall(r"`(\w+)`", row[3])) for name in names})
    return metrics


def _expressions() -> Iterator[tuple[str, str]]:
    """(where, expression) of every query."""
    dashboard = json.loads((CHART / "files" / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield f"panel {panel['title']}", target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["query"]["query"]
    for group in yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]


def test_every_query_names_metrics_and_labels_that_exist():
    known = _metrics()
    unknown = []
    for where, expression in _expressions():
        names = set(re.findall(r"\bkvcachepool_\w+", expression)) - ADDED
        assert names, where
        unknown += [(where, name) for name in names - set(known)]
        labels = set(re.findall(r'(\w+)\s*=~?\s*"', expression))
        for by in re.findall(r"\bby \(([^)]*)\)", expression):
            labels |= {label.strip() for label in by.split(",")}
        has = ADDED.union(*(known.get(name, set()) for name in names))
        unknown += [(where, label) for label in labels - has]
    assert unknown == []


def test_every_label_value_of_a_query_or_a_page_is_in_snake_case():
    """As metrics export them. Values with other characters are no names: patterns, addresses, versions."""
    texts = list(_expressions())
    texts += [(page.name, page.read_text()) for page in (ROOT / "docs").rglob("*.md")]
    wrong = []
    for where, text in texts:
        for matchers in re.findall(r"kvcachepool_\w+\{([^}]*)\}", text):
            for label, value in re.findall(r'(\w+)\s*[!=]~?\s*"([^"]*)"', matchers):
                wrong += [(where, label, name) for name in value.split("|") if re.search(r"[A-Z]", name)]
    assert wrong == []


@pytest.mark.parametrize(
    "metric",
    ["tier_down", "tier_degraded", "tier_breaker_open", "tier_corrupt_objects_total", "tier_write_chunks_total"],
)
def test_tier_problems_have_a_panel_and_an_alert(metric):
    where = {where.split()[0] for where, expression in _expressions() if f"kvcachepool_{metric}" in expression}
    assert where == {"panel", "alert"}


@pytest.mark.parametrize(
    "metric", ["loads_total", "load_choices_total", "tier_estimated_latency_seconds", "tier_estimated_bytes_per_second"]
)
def test_slow_loads_have_panels_in_the_row_that_their_alert_names(metric):
    row, shown = "", set()
    for panel in json.loads((CHART / "files" / "dashboard.json").read_text())["panels"]:
        row = panel["title"] if panel["type"] == "row" else row
        if any(f"kvcachepool_{metric}{{" in target["expr"] for target in panel.get("targets", [])):
            shown.add(row)
    assert shown == {"Lower tiers"}


def test_every_query_of_the_dashboard_is_of_the_chosen_clusters():
    for where, query in _expressions():
        if where.startswith("alert") or where == "variable cluster":
            continue
        chosen = re.findall(r'\b(kvcachepool_\w+)(\{cluster=~"\$cluster")?', query)
        assert [metric for metric, cluster in chosen if not cluster and metric not in ADDED] == [], where
        for by in re.findall(r"\bby \(([^)]*)\)", query):
            assert "namespace" not in by or "cluster" in by, f"{where}: namespaces of one name are merged"


def test_no_monitoring_objects_by_default(render):
    kinds = {o["kind"] for o in render()}
    assert not kinds & {"PodMonitor", "ServiceMonitor", "PrometheusRule"}
    assert not [o for o in render() if o["kind"] == "ConfigMap"]


def test_the_dashboard_arrives_as_it_is_written(render):
    shown = one(render({"monitoring": {"dashboard": {"enabled": True}}}), "ConfigMap")
    assert json.loads(shown["data"]["kvcachepool.json"]) == json.loads((CHART / "files" / "dashboard.json").read_text())
    assert shown["metadata"]["labels"]["grafana_dashboard"] == "1"


@pytest.mark.parametrize(
    ("value", "kind", "key"),
    [("podMonitor", "PodMonitor", "podMetricsEndpoints"), ("serviceMonitor", "ServiceMonitor", "endpoints")],
)
def test_a_monitor_scrapes_the_port_with_the_metrics(render, value, kind, key):
    endpoint = {"port": "admin", "path": "/metrics", "honorLabels": True}
    objects = render({"monitoring": {value: {"enabled": True, "labels": {"release": "prom"}, "interval": "10s"}}})
    monitor = one(objects, kind)
    assert monitor["spec"][key] == [{**endpoint, "interval": "10s"}]
    assert monitor["metadata"]["labels"]["release"] == "prom"
    labels = {"action": "replace", "targetLabel": "cluster", "replacement": "a"}
    more = {"scrapeTimeout": "5s", "relabelings": [labels], "metricRelabelings": [labels]}
    values = {"monitoring": {value: {"enabled": True, "annotations": {"a": "b"}, **more}}}
    changed = one(render(values), kind)
    assert changed["spec"][key] == [{**endpoint, "interval": "30s", **more}]
    assert changed["metadata"]["annotations"] == {"a": "b"}
    selected = one(objects, "Deployment")["spec"]["template"] if kind == "PodMonitor" else one(objects, "Service")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= selected["metadata"]["labels"].items()


def test_panels_fill_the_grid_without_overlap_and_read_the_chosen_data_source():
    panels = json.loads((CHART / "files" / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    source = {"type": "prometheus", "uid": "$datasource"}
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith("."), panel["title"]
        assert panel["datasource"] == source
        assert all(target["datasource"] == source for target in panel["targets"])
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_prometheus_parses_every_query_of_the_dashboard(promtool, tmp_path):
    queries = [query.replace("$__range", "1h") for where, query in _expressions() if where.startswith("panel")]
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = promtool("check", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
