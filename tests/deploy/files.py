"""The expressions of deploy/, by where they are."""

import json
from pathlib import Path

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
FOR_GRAFANA = {"$__rate_interval": "5m", "$worker": ".*", "$instance": "router"}


def groups():
    return yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]


def rules():
    return [rule for group in groups() for rule in group["rules"]]


def dashboard():
    return json.loads((DEPLOY / "grafana" / "baton.json").read_text())


def plain(expression):
    """As Prometheus gets it."""
    for variable, value in FOR_GRAFANA.items():
        expression = expression.replace(variable, value)
    return expression


def expressions():
    found = {rule["alert"]: rule["expr"] for rule in rules()}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            found[f"{panel['title']} {target['refId']}"] = plain(target["expr"])
    return found
