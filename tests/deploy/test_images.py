"""deploy/docker without a container engine: the files are parsed and linted, their pip commands are run, the pins are resolved again."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
import zipfile
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import dockerfile
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/docker"
IMAGES = ("Dockerfile", "Dockerfile.cpu")
LOCKS = ("constraints.txt", "constraints-tier.txt", "constraints-build.txt")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

spec = importlib.util.spec_from_file_location("lock", ROOT / "tools/lock.py")
lock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lock)


def stages(name: str) -> dict[str, list]:
    """Stage -> its instructions, FROM first; those before the first FROM under ""."""
    found = {"": []}
    for step in dockerfile.parse_file(str(FOLDER / name)):
        if step.cmd == "FROM":
            found[step.value[2]] = []
        found[list(found)[-1]].append(step)
    return found


def with_bases(found: dict[str, list], stage: str) -> list:
    """All instructions that make a stage, its bases' first."""
    base = found[stage][0].value[0]
    return (with_bases(found, base) if base in found else []) + found[stage]


def shipped() -> list[tuple[str, str]]:
    """(file, stage) that are images: what no other stage copies from or mounts is what people build."""
    return [("Dockerfile", "worker"), ("Dockerfile.cpu", "worker"), ("Dockerfile.cpu", "tier")]


def pip_commands() -> list[tuple[str, str, tuple, str]]:
    return [(name, stage, step.flags, step.value[0]) for name in IMAGES for stage, steps in stages(name).items()
            for step in steps if step.cmd == "RUN" and not step.json and re.match(r"pip ", step.value[0])]


def pins(name: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """name -> (version, hashes)"""
    body = (FOLDER / name).read_text().replace("\\\n", " ")
    found = {}
    for line in (line for line in body.splitlines() if not line.startswith("#")):
        requirement, *hashes = line.split()
        package, version = requirement.split("==")
        found[package] = version, tuple(h.removeprefix("--hash=sha256:") for h in hashes)
    return found


@pytest.fixture(scope="module")
def registry() -> None:
    try:
        urllib.request.urlopen(urllib.request.Request("https://pypi.org/simple/msgspec/", method="HEAD"), timeout=20).close()
    except OSError as error:
        pytest.skip(f"no package index, so the pins were NOT resolved: {error}")


# -- the files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IMAGES)
def test_hadolint_finds_nothing(name):
    done = subprocess.run([Path(sys.executable).parent / "hadolint", "--no-color", FOLDER / name], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", IMAGES)
def test_bases_are_pinned_and_the_digest_can_be_given(name):
    found = stages(name)
    arguments = dict(step.value[0].partition("=")[::2] for step in found[""])
    assert re.fullmatch(r"3\.11\.\d+-slim-bookworm", arguments["PYTHON_TAG"]) and arguments["PYTHON_DIGEST"] == ""
    for stage, steps in found.items():
        if stage:
            base = steps[0].value[0]
            assert base in found or base == "python:${PYTHON_TAG}${PYTHON_DIGEST:+@${PYTHON_DIGEST}}", base
    # Interpreter and C library are those that the pins were chosen for.
    assert arguments["PYTHON_TAG"].startswith(lock.PYTHON + ".") and lock.PLATFORM == "x86_64-manylinux_2_36"


@pytest.mark.parametrize(("name", "stage"), shipped())
def test_runs_as_a_numeric_user_without_a_shell_in_between(name, stage):
    steps = with_bases(stages(name), stage)
    last = {step.cmd: step for step in steps}
    assert any(step.cmd == "USER" for step in stages(name)[stage])  # said where it counts, not only in a base
    assert last["USER"].value == ("10001:10001",)
    assert last["ENTRYPOINT"].json and last["ENTRYPOINT"].value == ("/usr/bin/tini", "--", "oasis")
    assert last["CMD"].json
    made = next(step.value[0] for step in steps if step.cmd == "RUN" and "useradd" in step.value[0])
    assert "--uid 10001 --gid 10001" in made and "nologin" in made and "tini" in made
    environment = {k: v for step in steps if step.cmd == "ENV" for k, v in zip(step.value[::2], step.value[1::2])}
    assert environment["HOME"] == "/home/oasis" and environment["PATH"].startswith("/opt/oasis/bin:")
    assert "NVIDIA_VISIBLE_DEVICES" not in environment
    # Nothing is installed by the user that runs, and nothing belongs to it but its home.
    assert not any("--chown" in flag for step in steps for flag in step.flags)


@pytest.mark.parametrize(("name", "stage"), shipped())
def test_labels(name, stage):
    steps = with_bases(stages(name), stage)
    labels = {k: v.strip('"') for step in steps if step.cmd == "LABEL" for k, v in zip(step.value[::2], step.value[1::2])}
    prefix = "org.opencontainers.image."
    assert set(labels) == {prefix + key for key in ("title", "description", "version", "revision", "created", "source", "licenses", "base.name",
                                                    "base.digest")}
    assert labels[prefix + "licenses"] == PROJECT["project"]["license"]
    arguments = dict(step.value[0].partition("=")[::2] for step in steps if step.cmd == "ARG")
    assert arguments["VERSION"] == PROJECT["project"]["version"]
    for value in labels.values():
        assert all(argument in arguments for argument in re.findall(r"\$\{(\w+)\}", value))


def test_only_environments_are_copied_out_and_builders_are_shared():
    gpu, cpu = stages("Dockerfile"), stages("Dockerfile.cpu")
    assert list(cpu)[-1] == "tier" and list(gpu)[-1] == "worker"  # what is built when no target is named
    for stage in ("", "base", "wheel"):
        assert [(s.cmd, s.flags, s.value) for s in gpu[stage]] == [(s.cmd, s.flags, s.value) for s in cpu[stage]]
    for name, stage in shipped():
        copies = [step for step in with_bases(stages(name), stage) if step.cmd in ("COPY", "ADD")]
        assert [c.value for c in copies if c.flags] == [("/opt/oasis", "/opt/oasis")]
        assert [c.value[0] for c in copies if not c.flags] == ["LICENSE"]


def ignored(path: str) -> bool:
    """As .dockerignore says: the last pattern that matches the path or a folder above it decides."""
    parts = path.split("/")
    above = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    verdict = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.lstrip("!")
        regex = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(regex, p) for p in above):
            verdict = not line.startswith("!")
    return verdict


def test_what_is_copied_exists_and_the_rest_stays_outside():
    sources = {source for name in IMAGES for steps in stages(name).values() for step in steps
               if step.cmd == "COPY" and not step.flags for source in step.value[:-1]}
    assert {"pyproject.toml", "oasis_sglang", "transport", "prefill_node", "decode_node"} <= sources
    for source in sources:
        assert (ROOT / source).exists() and not ignored(source), source
    for path in (".git/config", ".venv/bin/python", "tests/unit/test_tier.py", "docs/metrics.md", "deploy/docker/Dockerfile", "shared/x",
                 "tier-0.key_secret", "transport/tier-0.key_secret", "transport/__pycache__/tier.cpython-311.pyc", "oasis_sglang.egg-info/PKG-INFO"):
        assert ignored(path), path


def test_pip_installs_by_hash_or_from_the_wheel_that_was_built():
    commands = pip_commands()
    assert len(commands) == 10
    for name, stage, _, command in commands:
        words = command.split()
        assert "--no-deps" in words, command
        if "-r" in words:
            assert {"--require-hashes", "--only-binary"} <= set(words) and words[words.index("--only-binary") + 1] == ":all:"
            assert "--no-cache-dir" in words
            constraints = Path(words[words.index("-r") + 1]).name
            copied = [source for step in stages(name)[stage] if step.cmd == "COPY" for source in step.value[:-1]]
            assert constraints in LOCKS and f"deploy/docker/{constraints}" in copied
        else:
            assert "--no-index" in words, command


# -- what they would install --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOCKS)
def test_pins_are_those_of_the_project(name):
    wanted, found = lock.inputs()[name], pins(name)
    said = re.search(r"inputs sha256:(\w+)", (FOLDER / name).read_text())[1]
    assert said == lock.digest(wanted), "the requirements have changed: python tools/lock.py"
    for requirement in map(Requirement, wanted):
        version, _ = found[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} is pinned to {version}"
    assert all(re.fullmatch(r"[0-9a-f]{64}", h) for _, hashes in found.values() for h in hashes)
    assert all(hashes for _, hashes in found.values())


def test_a_tier_gets_a_part_of_the_same():
    everything, tier = pins("constraints.txt"), pins("constraints-tier.txt")
    assert tier.items() < everything.items() and len(tier) < 60
    assert not {"torch", "sglang", "transformers", "triton"} & set(tier) and not [name for name in tier if name.startswith(("nvidia-", "cuda"))]
    assert pins("constraints-build.txt").items() <= everything.items()


@pytest.mark.parametrize(("name", "without"), [("constraints.txt", ()), ("constraints-tier.txt", lock.LEFT_OUT)])
def test_pins_are_complete(name, without):
    """By the requirements of what is installed here at the same version."""
    found, known = pins(name), 0
    for package, (version, _) in found.items():
        try:
            installed = distribution(package)
        except PackageNotFoundError:
            continue
        if installed.version != version:
            continue
        known += 1
        for requirement in map(Requirement, installed.requires or ()):
            needed = canonicalize_name(requirement.name)
            if needed not in without and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
                assert needed in found, f"{package} needs {requirement}"
                assert requirement.specifier.contains(found[needed][0], prereleases=True), f"{package} needs {requirement}, not {found[needed][0]}"
    assert known, "nothing here has the pinned version: python tools/lock.py, or install anew"


def test_the_compiler_belongs_to_the_headers():
    found = pins("constraints.txt")
    minor = {name: found[name][0].split(".")[:2] for name in (*lock.TOOLKIT, "nvidia-cuda-runtime")}
    assert len({tuple(m) for m in minor.values()}) == 1, minor


@pytest.mark.parametrize("name", LOCKS)
def test_the_index_resolves_to_the_same(name, registry):
    found = pins(name)
    again = lock.resolve(lock.inputs()[name], {package: version for package, (version, _) in found.items()},
                         lock.LEFT_OUT if name == "constraints-tier.txt" else ())
    assert {package: version for package, (version, _) in again.items()} == {package: version for package, (version, _) in found.items()}
    for package, (_, hashes) in found.items():
        assert set(hashes) <= set(again[package][1]), f"{package}: not the wheels that the index has"


def pip(command: str, cwd: Path, *more: str) -> str:
    """Runs a pip command of an image, here; returns what it says."""
    words = command.split()
    assert words[0] == "pip"
    done = subprocess.run([sys.executable, "-m", "pip", *words[1:], *more], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_pip_takes_pins(tmp_path, registry):
    command = next(command for name, stage, _, command in pip_commands() if stage == "wheel" and "-r" in command.split())
    assert "setuptools-" + pins("constraints-build.txt")["setuptools"][0] in pip(command, FOLDER, "--dry-run", "--ignore-installed")
    broken = (FOLDER / "constraints-build.txt").read_text().replace("sha256:", "sha256:0000", 2)
    (tmp_path / "constraints-build.txt").write_text(re.sub(r"0000(\w{60})\w{4}", r"0000\1", broken))
    with pytest.raises(AssertionError, match="DO NOT MATCH THE HASHES"):
        pip(command, tmp_path, "--dry-run", "--ignore-installed")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built by the command of the image out of what the image's stage copies, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    steps = stages("Dockerfile")["wheel"]
    for source in (source for step in steps if step.cmd == "COPY" for source in step.value[:-1]):
        subprocess.run(["cp", "-a", ROOT / source, folder / Path(source).name], check=True)
    command = next(step.value[0] for step in steps if step.cmd == "RUN" and step.value[0].startswith("pip wheel"))
    pip(command.replace("/dist", str(folder / "dist")), cwd=folder)
    return next((folder / "dist").glob("oasis_sglang-*.whl"))


def test_the_wheel_installs_as_in_the_image(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=60)
    command = next(command for name, stage, _, command in pip_commands() if stage == "tier-build" and "/dist" in command)
    pip(command.replace("/opt/oasis", str(tmp_path / "venv")).replace("/dist/*.whl", str(wheel)), tmp_path)
    shebang = (tmp_path / "venv/bin/oasis").read_text().splitlines()[0]
    assert shebang == f"#!{tmp_path}/venv/bin/python"


def test_the_wheel_has_all_of_the_project(wheel):
    archive = zipfile.ZipFile(wheel)
    inside = set(archive.namelist())
    kept = {".py", ".j2"}
    sources = {str(p.relative_to(ROOT)) for package in ("oasis_sglang", "transport", "prefill_node", "decode_node")
               for p in (ROOT / package).rglob("*") if p.suffix in kept and "__pycache__" not in p.parts}
    assert sources <= inside, sorted(sources - inside)
    points = next(name for name in inside if name.endswith("entry_points.txt"))
    said = archive.read(points).decode()
    assert "oasis = oasis_sglang.cli:main" in said and "sglang.srt.plugins" in said and "sglang.srt.platforms" in said
    assert any(name.endswith("licenses/LICENSE") for name in inside)


FENCE = '''
import sys
class Fence:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"not in the image of a tier: {name}", name=name)
sys.meta_path.insert(0, Fence())
'''


def test_a_tier_runs_on_what_its_image_holds(tmp_path):
    """Every process of it, its data planes' too: whatever else is installed here cannot be imported."""
    held = {*pins("constraints-tier.txt"), "oasis-sglang"}
    owners = defaultdict(set)
    for module, names in packages_distributions().items():
        owners[module] |= {canonicalize_name(name) for name in names}
    fenced = sorted(module for module, names in owners.items() if not names & held)
    assert {"torch", "sglang", "nixl_cu12", "yaml"} <= set(fenced) and "nixl_cu13" not in fenced
    (tmp_path / "sitecustomize.py").write_text(FENCE.replace("{names}", repr(set(fenced))))
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    run = [sys.executable, "-m", "oasis_sglang.cli"]
    refused = subprocess.run([sys.executable, "-c", "import torch"], env=environment, capture_output=True, text=True, timeout=60)
    assert "not in the image of a tier" in refused.stderr
    tier = subprocess.Popen([*run, "tier", "--local", tmp_path / "tier.sock", "--arena-bytes", "16MiB", "--http", "127.0.0.1:0"],
                            env=environment, stderr=subprocess.PIPE, text=True)
    try:
        said = []
        while not said or "ready:" not in said[-1]:
            said.append(tier.stderr.readline())
            assert said[-1], "".join(said)
        http = re.search(r'"http": "([^"]+)"', said[-1])[1]
        status, deadline = 0, time.monotonic() + 60
        while status != 200 and time.monotonic() < deadline:  # the NIXL plane's process imports it meanwhile
            try:
                with urllib.request.urlopen(f"http://{http}/readyz", timeout=5) as answer:
                    status = answer.status
            except urllib.error.HTTPError:
                time.sleep(0.2)
        assert status == 200
    finally:
        tier.send_signal(signal.SIGTERM)
        rest = tier.communicate(timeout=30)[1]
    assert tier.returncode == 0, rest
    router = subprocess.run([sys.executable, "-m", "oasis_sglang.router", "--help"], env=environment, capture_output=True, text=True, timeout=60)
    assert router.returncode == 0 and "--pd-disaggregation" in router.stdout, router.stderr
    keys = subprocess.run([*run, "keys", "create", "tier-0", "--out", tmp_path], env=environment, capture_output=True, text=True, timeout=60)
    assert keys.returncode == 0, keys.stderr
    doctor = subprocess.run([*run, "doctor", "--role", "tier", "--arena-bytes", "16MiB", "--json"], env=environment, capture_output=True, text=True, timeout=120)
    found = {check["name"]: check["status"] for check in json.loads(doctor.stdout)["checks"]}
    assert found["transfer nixl"] == found["transfer zmq"] == "ok", doctor.stdout
