"""docs/troubleshooting.md names every message of the library and no other, and the pages link to what exists."""

import ast
import dataclasses
import inspect
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import oasis_cache
from oasis_cache.cli import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, DOCS = ROOT / "oasis_cache", ROOT / "docs"
VARIES = "\x00"  # stands for what a message is filled with
GIVERS = ("warn", "warn_once", "_warn_once")


@dataclass(frozen=True)
class Message:
    """What the source raises or warns with at one place."""

    place: str
    text: str


def text_of(node: ast.expr) -> str:
    """The constant parts of a message, `VARIES` between them."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else VARIES for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return VARIES


def messages_of(path: Path) -> Iterator[Message]:
    """Messages of exceptions and warnings, of attributes and returned words that become such, in one file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    place = path.relative_to(PACKAGE)
    for node in ast.walk(tree):
        given: list[ast.expr] = []
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            given = node.exc.args
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in GIVERS:
            given = node.args
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("cause", "self.pin_failure"):
            given = [node.value]
        elif isinstance(node, ast.FunctionDef) and node.name == "refusal":
            given = [step.value for step in ast.walk(node) if isinstance(step, ast.Return) and step.value is not None]
        for text in map(text_of, given):
            if text.strip(VARIES):
                yield Message(f"{place}:{node.lineno}", " ".join(text.split(" ")))


def all_messages() -> list[Message]:
    return [message for path in sorted(PACKAGE.rglob("*.py")) for message in messages_of(path)]


def fragments() -> list[str]:
    """What the page quotes as parts of messages: the code in the tables' first column and in the list of the kernels'."""
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    kernels = page.split('??? note "Messages"')[1]
    return [
        code
        for part in (*cells, kernels)
        for code in re.findall("`([^`]+)`", part)
        if not re.fullmatch(r"\w+(Error|Warning)", code)
    ]


def matches(fragment: str, message: str) -> bool:
    """Whether a fragment, in which `...` stands for anything, is a part of a message."""
    return re.search(".*".join(map(re.escape, fragment.split("..."))), message, re.DOTALL) is not None


def test_finds_messages_of_every_kind() -> None:
    texts = [message.text for message in all_messages()]
    assert len(texts) > 150
    for part in ("unknown option", "page-locked memory", "gradients do not flow", "which oasis_cache does not know"):
        assert any(part in text for text in texts), part


def test_troubleshooting_names_every_message() -> None:
    known = fragments()
    assert all(len(fragment) >= 8 for fragment in known)
    missing = [
        f"{message.place}: {message.text.replace(VARIES, '...')}"
        for message in all_messages()
        if not any(matches(fragment, message.text) for fragment in known)
    ]
    assert not missing, "docs/troubleshooting.md lacks:\n" + "\n".join(missing)


def test_troubleshooting_names_nothing_else() -> None:
    texts = [message.text for message in all_messages()]
    stale = [fragment for fragment in fragments() if not any(matches(fragment, text) for text in texts)]
    assert not stale, f"no message of the library contains {stale}"


def test_links_between_pages_and_to_files_lead_somewhere() -> None:
    pages = [*DOCS.glob("*.md"), ROOT / "README.md"]
    broken = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert len(pages) > 10
    assert not broken


def test_advice_to_install_is_for_a_clone() -> None:
    """The package is in no registry: its extras come from a clone, and are those of pyproject.toml."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    places = [*PACKAGE.rglob("*.py"), *DOCS.glob("*.md"), *ROOT.glob("examples/*.py"), ROOT / "README.md"]
    texts = {path: path.read_text(encoding="utf-8") for path in places}
    assert [path.name for path, text in texts.items() if re.search(r"pip install[^\n]*oasis-cache", text)] == []
    named = [name for text in texts.values() for name in re.findall(r"pip install -e\s+[\"']\.\[([^\]]+)\]", text)]
    named = [name for names in named for name in names.split(",") if name != "{extra}"]
    asked = re.findall(r"how_to_install\([\"'](\w[\w-]*)[\"']\)", "".join(texts.values()))
    assert len(named) > 5 and len(asked) > 1
    assert {*named, *asked, *EXTRAS.values()} <= set(extras)


def public_functions() -> Iterator[tuple[str, object]]:
    """Public names, and the public methods and properties that their classes define themselves."""
    for name in oasis_cache.__all__:
        public = getattr(oasis_cache, name)
        if isinstance(public, str):
            continue
        yield name, public
        for member, value in vars(public).items() if isinstance(public, type) else ():
            if not member.startswith("_") and (callable(value) or isinstance(value, property | classmethod)):
                yield f"{name}.{member}", value


def test_public_names_have_docstrings_and_name_their_arguments() -> None:
    known = dict(public_functions())
    assert {"OasisCache.crop", "OasisConfig.dense_tokens", "OasisStats.hit_rate", "uninstall"} <= set(known)
    assert [name for name, public in known.items() if not inspect.getdoc(public)] == []
    config, stats = (inspect.getdoc(public) for public in (oasis_cache.OasisConfig, oasis_cache.OasisStats))
    for public, text in ((oasis_cache.OasisConfig, config), (oasis_cache.OasisStats, stats)):
        entries = re.findall(r"^ {4}([\w, ]+):", text or "", re.MULTILINE)
        named = {name.strip() for entry in entries for name in entry.split(",")}
        assert {field.name for field in dataclasses.fields(public)} <= named, public
