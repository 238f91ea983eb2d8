"""What the documents tell people to type exists: flags, values, files, Secrets, objects, links. Nothing is started."""

import argparse
import json
import math
import re
from functools import cache
from pathlib import Path

import chart_rig as rig
import click
import helm_python as helm
import pytest
import typer
import yaml
from chart_rig import CHART, KEY, ROOT, merged
from markdown_rig import Command, anchors, commands, dead_links, loose_footnotes
from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
from sglang.srt.server_args import ServerArgs
from typer.testing import CliRunner

from oasis_sglang import cli, launch, plugin
from transport import messages
from transport.errors import OasisError

DOCUMENTS = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/**/*.md")])
TYPED = [ROOT / "docs/quickstart.md", ROOT / "docs/operations.md", ROOT / "README.md", ROOT / "deploy/README.md", CHART / "README.md"]
QUICKSTART, OPERATIONS = (TYPED[0].read_text(), TYPED[1].read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
FOLDERS = ("deploy/", "docs/", "tools/", "tests/")
ROLES = {"prefill", "decode", "up"}
"""Commands that hand what they do not know to SGLang."""

by_name = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
typed_in = pytest.mark.parametrize("path", TYPED, ids=lambda path: str(path.relative_to(ROOT)))


# -- oasis ----------------------------------------------------------------------------------------------------------------


@cache
def sglang_parser() -> argparse.ArgumentParser:
    add_disagg_transfer_backend_choices([plugin.BACKEND])  # as our plugin does before SGLang parses
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser


def wrong_with_oasis(command: Command) -> str | None:
    """What the command line would say to it; None: nothing. ``...`` for further words has been left out, so nothing is missing."""
    node, words = typer.main.get_command(cli.app), list(command.words[1:])
    try:
        while isinstance(node, click.Group) or hasattr(node, "commands"):
            if words == ["--help"]:
                return None
            if not words or words[0] not in node.commands:
                return f"no command {' '.join(command.words)}"
            node, words = node.commands[words[0]], words[1:]
        context = node.make_context(node.name, words)
        if node.name in ROLES:
            _, rest = launch.split_flags(context.args)
            _, unknown = sglang_parser().parse_known_args(["--model-path", "MODEL", *rest])
            return f"SGLang has no {' '.join(unknown)}" if unknown else None
    except click.exceptions.Exit:
        return None  # --help
    except (OasisError, argparse.ArgumentError) as error:
        return str(error)
    except Exception as error:  # a usage error, of the click that typer brings
        return error.format_message() if hasattr(error, "format_message") else repr(error)
    return None


@typed_in
def test_oasis_commands_are_those_of_the_command_line(path):
    wrong = [f"line {one.line}: {' '.join(one.words)}: {why}" for one in commands(path.read_text()) if one.program == "oasis" and (why := wrong_with_oasis(one))]
    assert wrong == []


@pytest.mark.parametrize(("typed", "why"), [
    ("oasis keys make tier", "no command"), ("oasis doctor --rolle tier", "No such option"), ("oasis plan --requests many", "valid integer"),
    ("oasis decode --model-path M --oasis-budgettokens 5", "unknown option"), ("./oasis up --modell-path M", "SGLang has no"),
    ("oasis prefill --page-size sixteen", "page-size"), ("for x in a; do oasis keys create; done", "Missing argument"),
    ('oasis tier --memory-nodes "tcp://10.0.0.9:7400#$(oasis keys print memory.key)"', "no command"),
])
def test_a_wrong_command_is_noticed(typed, why):
    found = [wrong_with_oasis(one) for one in commands(f"```console\n$ {typed}\n```\n") if one.program == "oasis"]
    assert why in " ".join(filter(None, found))


def test_commands_are_found_with_all_their_words():
    text = "```console\n$ FOO=1 oasis a \\\n    --b '{\n  \"c\": 1}' | tee x    # isn't part\nnot typed\ntier$ ./oasis d #e\n```\n    $ not in a block\n"
    assert [one.words for one in commands(text)] == [("oasis", "a", "--b", '{\n  "c": 1}'), ("tee", "x"), ("./oasis", "d")]
    assert [one.line for one in commands(text)] == [2, 2, 6]
    with pytest.raises(ValueError, match="does not end"):
        list(commands("```\n$ oasis 'a\n```\n"))


# -- helm -----------------------------------------------------------------------------------------------------------------


class Release:
    """What ``helm install`` or ``upgrade`` of a document would make. Raises ``ValueError`` for what the command has wrong."""

    def __init__(self, command: Command):
        parser = argparse.ArgumentParser(exit_on_error=False)
        for flag in ("-f", "--set"):
            parser.add_argument(flag, action="append", default=[], dest=flag.lstrip("-"))
        parser.add_argument("-n", dest="namespace", default="default")
        for word in ("verb", "name", "chart"):
            parser.add_argument(word)
        given, unknown = parser.parse_known_args(list(command.words[1:]))
        if unknown or ROOT / given.chart != CHART or not (CHART / "Chart.yaml").exists():
            raise ValueError(f"not our chart, or what is {unknown}?")
        self.name, self.namespace = given.name, given.namespace
        self.files = [ROOT / file for file in given.f]
        self.values = merged(*(yaml.safe_load(file.read_text()) for file in self.files), *map(assigned, given.set))

    def objects(self) -> list[dict]:
        rendered = rig.chart().render(self.values, name=self.name, namespace=self.namespace)
        return [one for name, text in rendered.items() if not name.endswith("NOTES.txt") for one in yaml.load_all(text, rig.Loader) if one]

    def secrets(self) -> set[str]:
        return set(filter(None, self.values.get("security", {}).get("keys", {}).values()))


def assigned(text: str) -> dict:
    """``a.b=c,d=e`` and ``a={b,c}`` as Helm reads them. Raises ``ValueError`` for a path that the schema does not have."""
    found: dict = {}
    for part in re.split(r",(?![^{]*\})", text):
        path, _, value = part.partition("=")
        steps, node = path.split("."), SCHEMA
        for step in steps:
            node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
            properties = node.get("properties", {})
            if step not in properties and (properties or node.get("additionalProperties") is False):
                raise ValueError(f"--set {path}: no value {step}")
            node = properties.get(step, {})
        plain = value.replace("PRINTED", KEY)
        words = plain[1:-1].split(",") if plain.startswith("{") else yaml.safe_load(plain) if re.fullmatch(r"\d+|true|false", plain) else plain
        for step in reversed(steps):
            words = {step: words}
        found = merged(found, words)
    return found


def releases(text: str) -> list[Release]:
    return [Release(one) for one in commands(text) if one.program == "helm" and one.words[1] in ("install", "upgrade")]


@pytest.mark.parametrize("path", [path for path in TYPED if releases(path.read_text())], ids=lambda path: str(path.relative_to(ROOT)))
def test_helm_commands_render(path):
    for release in releases(path.read_text()):
        assert len(rig.kinds(release.objects(), "StatefulSet", "Deployment", "LeaderWorkerSet")) >= 3, release.name


def test_every_example_is_installed_by_the_quick_start():
    assert {file.name for release in releases(QUICKSTART) for file in release.files} == {path.name for path in rig.EXAMPLES.glob("*.yaml")}


def test_values_in_the_prose_are_values():
    sets = [text for path in DOCUMENTS for text in re.findall(r"`--set (\w+\.[^`]+)`", path.read_text())]
    assert sets and all(assigned(text) for text in sets)
    plain = re.search(r"`--set (security.allowPlaintext[^`]+)`", QUICKSTART)[1]
    llama = yaml.safe_load((rig.EXAMPLES / "llama-3.1-8b-1p1d.yaml").read_text())
    assert "--allow-plaintext" in rig.arguments(rig.by_role(rig.render(merged(llama, assigned(plain))))["prefill"]["tier"])


@pytest.mark.parametrize(("typed", "why"), [
    ("helm install x deploy/helm/oasis --set model.paht=a", "no value paht"), ("helm install x deploy/helm/oasis --set decode.hostCache.size=1Gi", None),
    ("helm install x deploy/helm/oasis -f deploy/helm/examples/llama.yaml", None), ("helm install x deploy/helm/other", "not our chart"),
    ("helm install x deploy/helm/oasis --set model.path=/m", "security.keys.decode is missing"),
    ("helm upgrade x deploy/helm/oasis --set model.path=/m,security.allowPlaintext=true --set router.replicas=many", "router"),
])
def test_a_wrong_helm_command_is_noticed(typed, why):
    with pytest.raises((ValueError, OSError, helm.HelmError), match=why):
        for release in releases(f"```\n$ {typed}\n```\n"):
            release.objects()


# -- kubectl, files -------------------------------------------------------------------------------------------------------


def missing_objects(text: str) -> list[str]:
    """Objects, containers and ports that a document's ``kubectl`` lines name, and none of its releases has."""
    made, containers = set(), set()
    for release in releases(text):
        objects = release.objects()
        made |= {(one["kind"].lower(), one["metadata"]["name"]) for one in objects}
        made |= {("pod", f"{one['metadata']['name']}-{n}") for one in rig.kinds(objects, "StatefulSet") for n in range(one["spec"].get("replicas", 1))}
        containers |= {(pod.owner["metadata"]["name"], one["name"]) for pod in rig.pods(objects) for one in pod.containers}
    found = []
    for one in (command for command in commands(text) if command.program == "kubectl"):
        words = one.words
        if not {"logs", "port-forward", "rollout", "exec"} & set(words):
            continue
        [named] = [word for word in words if re.match(r"(svc|deployment|statefulset)/|[a-z0-9]+-oasis-", word)]
        kind, name = named.split("/") if "/" in named else ("pod", named)
        if ({"svc": "service"}.get(kind, kind), name) not in made:
            found.append(f"line {one.line}: {named}")
        if "-c" in words and (name if kind != "pod" else name.rpartition("-")[0], words[words.index("-c") + 1]) not in containers:
            found.append(f"line {one.line}: -c {words[words.index('-c') + 1]}")
    return found


def test_kubectl_lines_name_what_is_rendered():
    assert missing_objects(QUICKSTART) == missing_objects(OPERATIONS) == []
    wrong = missing_objects(QUICKSTART.replace("svc/llama-oasis-router", "svc/llama-oasis-routers").replace("-c doctor-tier", "-c doctor-tiers"))
    assert [one.partition(": ")[2] for one in wrong] == ["-c doctor-tiers", "svc/llama-oasis-routers"]


def created(text: str) -> dict[str, dict[str, str]]:
    """Secret -> its keys and the files they come from."""
    found = {}
    for one in commands(text):
        if one.program == "kubectl" and "create" in one.words and "secret" in one.words:
            given = [word.removeprefix("--from-file=") for word in one.words if word.startswith("--from-file=")]
            found[one.words[one.words.index("generic") + 1]] = dict(part.split("=") if "=" in part else (Path(part).name, part) for part in given)
    return found


def test_secrets_are_made_as_the_chart_wants_them():
    secrets = created(QUICKSTART)
    for release in releases(QUICKSTART):
        assert release.secrets() <= set(secrets), release.name
    whose = {name: Path(keys["node.key_secret"]).stem for name, keys in secrets.items()}
    for name, keys in secrets.items():
        assert set(keys) - {"node.key_secret"} == {f"{other}.key" for other in whose.values() if other != whose[name]}, name
    made = [word for one in commands(QUICKSTART) if one.words[:3] == ("oasis", "keys", "create") for word in one.words]
    assert made[-2:] == ["--out", "keys"] and f"for name in {' '.join(whose.values())};" in QUICKSTART
    assert created((CHART / "README.md").read_text())["oasis-memory"] == secrets["oasis-memory"]


@typed_in
def test_files_that_are_typed_exist(path):
    words = [word.partition("=")[2] if word.startswith("--from-file=") else word for one in commands(path.read_text()) for word in one.words]
    assert [word for word in words if word.startswith(FOLDERS) and not (ROOT / word).exists()] == []


# -- links ----------------------------------------------------------------------------------------------------------------


@by_name
def test_links_lead_somewhere(path):
    text = path.read_text()
    assert dead_links(path, text) == [] and loose_footnotes(text) == set()


def test_a_dead_link_is_noticed():
    text = ("# One `two` & three\n## A.b\n## A.b\n[a](#one-two--three) [b](#ab-1) [c](docs/plan.md#examples) [`d`](README.md) [e](https://x.invalid/y)\n"
            "[f](#ab-2) [g](docs/plans.md) [h](docs/plan.md#exampels) `[i](none.md)`\n[^1] [^2]\n\n[^2]: x\n[^3]: y\n")
    assert anchors(text) == {"one-two--three", "ab", "ab-1"}
    assert [one.partition(":")[0] for one in dead_links(ROOT / "X.md", text)] == ["#ab-2", "docs/plans.md", "docs/plan.md#exampels"]
    assert loose_footnotes(text) == {"1", "3"}


def test_every_section_of_operations_is_in_its_contents():
    contents, _, rest = OPERATIONS.partition("\n## ")
    assert re.findall(r"^\* \[([^\]]+)\]", contents, re.M) == re.findall(r"^## (.*)$", "## " + rest, re.M)


# -- figures --------------------------------------------------------------------------------------------------------------


def table_after(text: str, head: str) -> dict[str, list[str]]:
    """First column -> the others, of the table whose first cell is ``head``."""
    lines = text[text.index(f"| {head} |"):].split("\n\n")[0].splitlines()
    return {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)}


def test_the_sizes_are_those_of_the_plan():
    plans = [one.words[1:] for one in commands(OPERATIONS) if one.words[:2] == ("oasis", "plan")]
    said = [CliRunner().invoke(cli.app, [*words, "--markdown"]).stdout for words in plans]
    shown, chosen = table_after(OPERATIONS, "of the plan"), table_after(OPERATIONS, "so, for")
    assert len(plans) == 3 and shown.pop("of the plan") == ["Llama-3.1-8B", "Qwen3-8B", "Qwen3-32B"]
    shown.pop("---")
    for row, cells in shown.items():
        assert cells == [table_after(text, "prompt tokens")[row][0] for text in said], row
    [llama, qwen, large] = [json.loads(CliRunner().invoke(cli.app, [*words, "--json"]).stdout)["forecasts"][0] for words in plans]

    def gib(number: float) -> str:
        return f"{math.ceil(number / 2**30)}Gi"

    assert chosen["`tier.arena`"][:2] == [gib(1.25 * 32 * one["tier_bytes"]) for one in (llama, qwen)]
    assert chosen["`tier.arena`"][2] == f"64Gi: {(64 << 30) // large['tier_bytes']} prompts on their way"
    assert chosen["`tier.memoryNodes.arena`"][2] == gib(1.25 * 64 * large["tier_bytes"] / 2)
    assert chosen["`decode.hostCache`"] == [gib(32 * sum(one["decode_host_bytes"].values())) for one in (llama, qwen, large)]
    assert chosen["`decode.kvPoolTokens`"] == [str(one["kv_pool_tokens"]) for one in (llama, qwen, large)]
    example = yaml.safe_load((rig.EXAMPLES / "llama-3.1-8b-1p1d.yaml").read_text())
    assert f"the arena of the first holds {rig.quantity(example['tier']['arena']) // llama['tier_bytes']} such prompts" in OPERATIONS
    values = releases(OPERATIONS)[0].values
    assert [values["tier"]["arena"], values["decode"]["hostCache"], str(values["decode"]["kvPoolTokens"])] == [
        chosen[f"`{name}`"][0] for name in ("tier.arena", "decode.hostCache", "decode.kvPoolTokens")]


def test_the_protocol_is_the_one_that_is_named():
    assert f"The protocol is {messages.PROTOCOL} in this version" in OPERATIONS
