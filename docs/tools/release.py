"""`make release` builds the three distributions into dist/, checks them and tries them.

A wheel is built from its source distribution, so that this one is complete. The check reads the wheels: one
version, which the changelog knows; complete metadata; every file of the package and no other. Then the wheels
are installed into a new virtual environment, and the first Python example of README runs there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
PROJECTS = {"jacobiflow": ".", "jacobiflow_lab": "lab", "jacobiflow_models": "models"}
FIELDS = ("Summary", "License-Expression", "License-File", "Requires-Python", "Keywords", "Classifier")
LOCAL_LINK = re.compile(r"\]\((?!https?:|#)[^)]*\)")


def run(*command: object, cwd: Path = ROOT) -> str:
    """The output of a command. The release ends if it fails."""
    ran = subprocess.run(list(map(str, command)), cwd=cwd, stdout=subprocess.PIPE, text=True, check=False)
    if ran.returncode:
        sys.exit(f"release: {' '.join(map(str, command))} failed: see above")
    return ran.stdout


def problems(
    name: str, metadata: Message, files: set[str], sources: set[str], expected: set[str], changelog: str
) -> list[str]:
    """What is wrong with metadata, files of the wheel, and paths of the source distribution."""
    found = [f"no {field}" for field in FIELDS if not metadata.get(field)]
    body = str(metadata.get_payload())
    found += [f"the description has the link {link!r}, which leads nowhere" for link in LOCAL_LINK.findall(body)]
    if f"## [{metadata['Version']}]" not in changelog:
        found.append(f"CHANGELOG.md has no heading ## [{metadata['Version']}]")
    found += [f"{path} is missing" for path in sorted(expected - files)]
    found += [f"{path} is not of the repository" for path in sorted(files - expected)]
    others = {path.partition("/")[0] for path in sources} & {"lab", "models"}
    found += [f"the source distribution contains {folder}/" for folder in sorted(others)]
    return [f"{name}: {text}" for text in found]


def check(wheel: Path, name: str, folder: str) -> tuple[str, list[str]]:
    """The version of a wheel, and what is wrong with it."""
    source = f"{folder}/src/" if folder != "." else "src/"
    expected = {path.removeprefix(source) for path in run("git", "ls-files", source).splitlines()}
    with zipfile.ZipFile(wheel) as archive:
        inside = archive.namelist()
        about = next(path for path in inside if path.endswith(".dist-info/METADATA"))
        metadata = message_from_string(archive.read(about).decode())
    files = {path for path in inside if ".dist-info/" not in path}
    (sdist,) = wheel.parent.glob(f"{name}-*.tar.gz")
    with tarfile.open(sdist) as sdist_archive:
        sources = {path.partition("/")[2] for path in sdist_archive.getnames()}
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return str(metadata["Version"]), problems(name, metadata, files, sources, expected, changelog)


def main() -> None:
    """Build, check, install, run."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    versions, wrong = set(), []
    for name, folder in PROJECTS.items():
        print(f"building {name}", flush=True)
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, folder)
        (wheel,) = dist.glob(f"{name}-*.whl")
        version, found = check(wheel, name, folder)
        versions.add(version)
        wrong += found
    if len(versions) > 1:
        wrong.append(f"the distributions have different versions: {', '.join(sorted(versions))}")
    if wrong:
        sys.exit("release: " + "\n  ".join([f"{len(wrong)} problems", *wrong]))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = readme.partition("```python\n")[2].partition("```")[0]
    with TemporaryDirectory() as folder:
        print("installing the wheels into a fresh environment", flush=True)
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        quiet = ("--quiet", "--disable-pip-version-check")
        wheels = sorted(dist.glob("*.whl"))
        run(python, "-m", "pip", "install", *quiet, "-c", ROOT / "constraints.txt", *wheels, cwd=Path(folder))
        print("running the first example of README there", flush=True)
        run(python, "-I", "-c", example, cwd=Path(folder))
    for path in sorted(dist.iterdir()):
        print(f"{path.stat().st_size / 1e6:8.2f} MB  {path.relative_to(ROOT)}")
    print("all good: upload dist/ with twine")


if __name__ == "__main__":
    main()
