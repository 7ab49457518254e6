"""The rules and the dashboard are well formed; what they name is checked by tests/e2e/test_deploy.py."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from baton.cluster.cli import runbook_names
from baton.core import errors
from baton.router.metrics import is_clients
from baton.tests.deploy.files import DEPLOY, dashboard, expressions, groups, rules
from baton.tests.deploy.promql import AGGREGATIONS, BY, parse, tokens_of

pytestmark = pytest.mark.fast

WANTED = (
    "BatonWorkerDown",
    "BatonWorkerUnfit",
    "BatonNoDecodeWorker",
    "BatonNoPrefillWorker",
    "BatonHeartbeatLate",
    "BatonKvLeak",
    "BatonAcceptanceRegression",
    "BatonHostGap",
    "BatonQuarantineGrows",
    "BatonTtftBudgetBurnsFast",
    "BatonGraphFallbacks",
    "BatonKvCorrupt",
    "BatonKvStrangers",
)


def test_every_rule_has_what_prometheus_and_a_person_need():
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    assert set(WANTED) <= set(names)
    assert len({group["name"] for group in groups()}) == len(groups())
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}, rule["alert"]
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description"}
        for text in rule["annotations"].values():
            assert text.count("{{") == text.count("}}")


def test_an_alert_names_the_runbooks_that_its_metric_calls_for_and_none_that_is_not_there():
    """A runbook is called for if it bears the alert's name, or if *When* of its page names a metric of the rule."""
    names = set(runbook_names())
    pages = {name: (DEPLOY.parent / "runbook" / f"{name.replace('-', '_')}.md").read_text() for name in names}
    metrics = {
        name: set(re.findall(r"baton_\w+", page.partition("**When.**")[2].partition("```")[0]))
        for name, page in pages.items()
    }
    assert any(metrics.values())
    for rule in rules():
        named = set(re.findall(r"baton runbook ([\w-]+)", rule["annotations"]["description"]))
        read = {selector.name.removesuffix("_total") for selector in parse(rule["expr"]).selectors}
        words = "-".join(word.lower() for word in re.findall("[A-Z][a-z]+", rule["alert"])[1:])
        wanted = {name for name in names if metrics[name] & read or name.startswith(words)}
        assert wanted <= named <= names, f"{rule['alert']} names {named}, not {wanted}"


def test_what_the_scrape_configuration_adds_for_certificates_is_of_a_job():
    """Uncommented, it is YAML whose files are those of docs/security-setup.md."""
    text = (DEPLOY / "prometheus" / "prometheus.yaml").read_text()
    lines = [
        re.sub(r"^(    )# (?=[\w ]+:( |$))", r"\1", line) for line in text.splitlines() if "Of a router" not in line
    ]
    [job] = yaml.safe_load("\n".join(lines))["scrape_configs"]
    assert job["scheme"] == "https"
    assert set(job["tls_config"]) == {"ca_file", "cert_file", "key_file", "server_name"}
    made = (DEPLOY.parent / "docs" / "security-setup.md").read_text()
    assert all(value in made for value in job["tls_config"].values())


def test_the_scrape_configuration_loads_the_rules_and_names_the_job():
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    assert config["rule_files"] == ["alerts.yaml"]
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    matchers = [m for rule in rules() for s in parse(rule["expr"]).selectors for m in s.matchers if m[0] == "job"]
    assert {value for _, _, value in matchers} == jobs


@pytest.mark.parametrize(("where", "expression"), expressions().items())
def test_an_expression_is_well_formed(where, expression):
    assert parse(expression).selectors


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_a_rule_keeps_deployments_apart(rule):
    """Their workers have the same names; their routers are `instance`."""
    tokens = [value for _, value in tokens_of(rule["expr"])]
    for at, token in enumerate(tokens):
        if token in AGGREGATIONS:
            assert tokens[at + 1] == "by", f"{token} of all deployments"
        if token in BY:
            assert "instance" in tokens[at : tokens.index(")", at)]
    assert not {"absent", "ignoring", "without"} & set(tokens), "what is not there has no instance"


def test_a_deployment_of_decode_workers_alone_is_no_reason_to_page():
    """Its router has never shown a prefill worker."""
    by_name = {rule["alert"]: rule for rule in rules()}
    assert by_name["BatonNoPrefillWorker"]["labels"]["severity"] == "ticket"
    assert by_name["BatonNoDecodeWorker"]["labels"]["severity"] == "page"
    pages = [rule for rule in rules() if rule["labels"]["severity"] == "page"]
    matchers = [m for rule in pages for s in parse(rule["expr"]).selectors for m in s.matchers]
    assert ("role", "=", "prefill") not in matchers


@pytest.mark.long
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is Prometheus's own, and no Python package")
def test_rules_fire_for_series_as_they_should(tmp_path):
    plain = [{**rule, "annotations": {}} for rule in rules()]  # it would compare each text
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": plain}]}))
    shutil.copy(Path(__file__).parent / "alerts_test.yaml", tmp_path)
    command = ["promtool", "test", "rules", "alerts_test.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_errors_that_rules_name_exist():
    named = [m for text in expressions().values() for s in parse(text).selectors for m in s.matchers if m[0] == "error"]
    for _, _, value in named:
        for name in value.split("|"):
            assert issubclass(getattr(errors, name), errors.BatonError)


def test_no_rule_counts_what_clients_do_wrong():
    selectors = [s for rule in rules() for s in parse(rule["expr"]).selectors]
    excluded = [m[2] for s in selectors for m in s.matchers if m[:2] == ("error", "!~")]
    assert excluded
    for value in excluded:
        assert set(value.split("|")) == {name for name in vars(errors) if is_clients(name)}


def test_panels_have_their_own_place_and_number():
    panels = dashboard()["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert len({target["refId"] for target in panel.get("targets", ())}) == len(panel.get("targets", ()))


def test_panels_show_one_deployment():
    """As for rules. Of the chosen router, not of several ones, so that a legend need not name it."""
    [chosen] = [one for one in dashboard()["templating"]["list"] if one["name"] == "instance"]
    assert not chosen["multi"] and not chosen["includeAll"]
    [workers] = [one for one in dashboard()["templating"]["list"] if one["name"] == "worker"]
    assert 'instance="$instance"' in workers["query"]["query"]
    targets = [target for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    assert targets
    for target in targets:
        for selector in parse(target["expr"].replace("$__rate_interval", "5m")).selectors:
            assert ("instance", "=", "$instance") in selector.matchers, target["expr"]


@pytest.mark.parametrize(
    "text",
    [
        "sum(rate(a_total[5m])",
        "sum(rate(a_total[5m]))]",
        "sum(rate(a_total))",
        "a_total[5m]",
        "raet(a_total[5m])",
        'a{b~"c"}',
        "a{b=c}",
        "rate(a[x])",
        "a ? b",
        "sum by a (b)",
    ],
)
def test_what_is_not_well_formed_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        parse(text)
