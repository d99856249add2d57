"""No command but the one that fetches training pictures reaches for a network."""
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.test_package import imported

ROOT = Path(__file__).parent.parent.parent
REACHES_OUT = {"aiohttp", "ftplib", "http", "httpx", "huggingface_hub", "requests", "smtplib", "socket", "ssl",
               "urllib.request", "urllib3", "xmlrpc"}
ALLOWED = {"specvis/cli/workers.py": {"socket"}}  # for the name of this machine; Ray's processes talk to each other
REFUSE = """
import sys

def refuse(event, arguments):  # every socket that Python makes, names that it looks up, programs that may do it instead
    # ldconfig: Triton asks it where the driver's library is, if torch is a build with CUDA
    if event.startswith(("socket.", "subprocess.", "os.exec", "os.posix_spawn", "os.system")) \
            and arguments[:1] != ("/sbin/ldconfig",):
        raise SystemExit(f"{event} {arguments}")

sys.addaudithook(refuse)
"""


def run(program, *arguments):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "python")])}
    return subprocess.run([sys.executable, "-c", REFUSE + program, *map(str, arguments)], capture_output=True,
                          text=True, cwd=ROOT, env=environment)


def test_what_reaches_out_is_stopped():
    for line in ("import socket; socket.socket()", "import socket; socket.getaddrinfo('localhost', 80)",
                 "import urllib.request; urllib.request.urlopen('http://localhost')",
                 "import subprocess; subprocess.run(['true'])", "import os; os.system('true')"):
        done = run(line)
        assert done.returncode == 1 and done.stderr.startswith(("socket.", "subprocess.", "os.system")), line


def test_nothing_imports_what_reaches_out():
    """Training pictures come from `npm pack`, a program; Transformers may look at local files alone."""
    for root, folder in ((ROOT, "specvis_kernels"), (ROOT / "python", "specvis")):
        for file, modules in imported(root, folder).items():
            far = {out for out in REACHES_OUT for name in modules if f"{name}.".startswith(f"{out}.")}
            assert far <= ALLOWED.get(file, set()), file
            calls = re.findall(r"\.from_pretrained\((?:[^()]|\([^()]*\))*\)", (root / file).read_text())
            assert all("local_files_only=True" in call or "weights_path=" in call for call in calls), f"{file}: {calls}"
