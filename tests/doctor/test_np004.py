"""NP004: suppressions, in a config's comments and in the project's file, and what they leave of the
findings.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from codes import beside_nemo
from configs import NEST

from nemo_patches.tools.doctor import command
from nemo_patches.tools.doctor.request import Request

pytestmark = pytest.mark.one_nemo

STOCK = (
    NEST.replace("40.0", "60.0")
    .replace("pos_emb_max_len: 5000", "pos_emb_max_len:  5000    # frames")
    .replace("conv_norm_type: batch_norm", "sync_max_audio_length: ???")
)
CLEAN = NEST


def write(folder: Path, text: str, name: str = "nest.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def doctor(
    capfd: pytest.CaptureFixture[str], *arguments: object, select: tuple[str, ...] = ()
) -> tuple[int, str, str]:
    code = command.carry_out(Request(tuple(map(str, arguments)), select=select))
    return code, *capfd.readouterr()


@pytest.mark.parametrize("own_line", [False, True])
def test_a_finding_is_suppressed_on_its_line_with_a_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], own_line: bool
) -> None:
    line = "    pos_emb_max_len:  5000    # frames"
    comment = "# nemo-patches: ignore[NP102] no clip is longer than 40 s"
    suppressed = STOCK.replace(
        line, f"    {comment}\n{line}" if own_line else f"{line} {comment}"
    )
    code, out, _ = doctor(capfd, write(tmp_path, suppressed))
    assert code == 0
    assert "NP102" not in out
    assert out.endswith(": 1 note, 1 suppressed\n")
    for text, said in (
        (
            suppressed.replace(" no clip is longer than 40 s", ""),
            "ignore[NP102] has no reason, so it suppresses nothing",
        ),
        (suppressed.replace("60.0", "40.0"), "ignore[NP102] suppresses nothing here"),
        (
            suppressed.replace("[NP102]", "[NP999]"),
            "ignore[NP999] names no rule that can be suppressed",
        ),
        (
            suppressed.replace("[NP102]", ""),
            "ignore[] names no rule that can be suppressed",
        ),
        (
            suppressed.replace("[NP102]", "[NP004]"),
            "ignore[NP004] names no rule that can be suppressed",
        ),
    ):
        code, out, _ = doctor(capfd, write(tmp_path, text))
        assert code == 1
        assert f"NP004 warning: {said}" in out
        assert ("NP102 warning" in out) is ("60.0" in text)  # it is not suppressed
    clean = write(tmp_path, suppressed.replace("60.0", "40.0"))
    # With other values it may be needed.
    assert doctor(capfd, clean, "trainer.devices=8")[0] == 0
    assert doctor(capfd, clean, select=("NP1",))[0] == 0


@beside_nemo
def test_code_has_suppressions_in_its_comments(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    comment = "  # nemo-patches: ignore[NP401] all ranks have the same x"
    in_a_text = f'\n\nTEXT = """\n{comment}\n"""\n'
    lines = (
        "class Mine:\n    def forward(self, x):\n        if x.any():\n{}           "
        " dist.barrier(){}\n" + in_a_text
    )
    for above, behind in (("", comment), (f"            {comment.strip()}\n", "")):
        code, out, _ = doctor(
            capfd, write(tmp_path, lines.format(above, behind), "model.py")
        )
        assert code == 0
        assert out.endswith(": nothing, 1 suppressed\n")
        for text, said in (
            (
                lines.format(above, behind).replace("dist.", "self."),
                "ignore[NP401] suppresses nothing here",
            ),
            (
                lines.format(above, behind).replace(" all ranks have the same x", ""),
                "ignore[NP401] has no reason",
            ),
        ):
            assert said in doctor(capfd, write(tmp_path, text, "model.py"))[1]
    write(tmp_path, lines.format("", ""), "model.py")
    assert doctor(capfd, "model.py")[0] == 1
