"""The statements of NeMo that the edit replaces:
the reduces, and the tables that grow with the input's length, which become plain attributes.

DDP broadcasts buffers from rank 0 in every forward, in one flat tensor: where ranks have grown
theirs to different lengths, it overwrites rows, or aborts. patches/upstream/ has the same
statements for the tables.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_patches.patching.targets import BOUNDED_FUNCTION, TARGETS

_ATTENTION = "nemo/collections/asr/parts/submodules/multi_head_attention.py"
_JASPER = "nemo/collections/asr/parts/submodules/jasper.py"
_CONFORMER = "nemo/collections/asr/modules/conformer_encoder.py"
_CONV = "nemo/collections/asr/modules/conv_asr.py"
_SQUEEZEFORMER = "nemo/collections/asr/modules/squeezeformer_encoder.py"
_TRANSFORMER = "nemo/collections/asr/modules/transformer_encoder.py"
_PUNCTUATION = (
    "nemo/collections/nlp/models/token_classification/"
    "punctuation_capitalization_lexical_audio_model.py"
)
_PUNCTUATION_OWNER = "PunctuationCapitalizationLexicalAudioModel"
# The files whose tables an encoder reads: without their edit, its own would be wrong.
READS = {
    _CONFORMER: _ATTENTION,
    _SQUEEZEFORMER: _ATTENTION,
    _TRANSFORMER: _ATTENTION,
    _CONV: _JASPER,
}


@dataclass(frozen=True)
class KnownStatement:
    """One statement of NeMo, and what comes in its place."""

    path: str
    owner: str
    function: str
    known: str  # as `ast.unparse` gives it
    instead: str
    methods: str = ""  # put after the function
    # The same statement in another form, which some forks have.
    other: tuple[str, str] | None = None
    setter: str = ""  # of the reduce's class: the function that grows its tables


def _registered(name: str) -> str:
    return f"""\
if hasattr(self, '{name}'):
    self.{name} = {name}
else:
    self.register_buffer('{name}', {name}, persistent=False)"""


_WHY = (
    "# Not a buffer: DDP broadcasts buffers, and the length of this table differs"
    " between ranks."
)
_PE = f"""\
{_WHY}
with torch.inference_mode(False):  # a validation may make it, and training reads it
    self.pe = pe.clone()"""
_PE_METHODS = '''
def _apply(self, fn, *args, **kwargs):
    """Takes the table along with `to()`, `half()` and the like."""
    super()._apply(fn, *args, **kwargs)
    if 'pe' in self.__dict__:
        self.pe = fn(self.pe)
    return self

def _pe_on(self, device):
    """The table on the input's device: FSDP and DataParallel move buffers without `_apply()`."""
    if self.pe.device != device:
        self.pe = self.pe.to(device)
    return self.pe'''
_POSITIONS = {
    "PositionalEncoding": ":input_len",
    "RelPositionalEncoding": "start_pos:end_pos",
    "LocalAttRelPositionalEncoding": ":end_pos",
}
_MASK = (
    "mask = self.seq_range[:max_audio_length]{}.expand(seq_lens.size(0), -1) <"
    " seq_lens.unsqueeze(-1)"
)


def _seq_range(path: str, owner: str, function: str) -> KnownStatement:
    return KnownStatement(
        path,
        owner,
        function,
        known=_registered("seq_range"),
        instead=f"{_WHY}\nself.seq_range = seq_range",
    )


def _pad_mask(path: str, owner: str) -> KnownStatement:
    return KnownStatement(
        path,
        owner,
        "make_pad_mask",
        known=_MASK.format(""),
        instead=_MASK.format(".to(seq_lens.device)"),
    )


_FLAG = "self.sync_max_audio_length"
_REDUCE = """\
if {test}torch.distributed.is_initialized():
    global_max_len = torch.tensor([seq_length], dtype=torch.float32, device=device)
    torch.distributed.all_reduce(global_max_len, op=torch.distributed.ReduceOp.MAX)
    seq_length = global_max_len.int().item()"""
_WITHOUT = (
    _REDUCE.format(test=""),
    f"seq_length = {BOUNDED_FUNCTION}(self, seq_length)",
)
_WITH = (
    _REDUCE.format(test=f"{_FLAG} and "),
    f"seq_length = {BOUNDED_FUNCTION}(self, seq_length, {_FLAG})",
)
REDUCES = tuple(
    KnownStatement(
        target.module.replace(".", "/") + ".py",
        target.owner,
        target.method,
        *_WITHOUT,
        other=_WITH,
        setter=target.setter or target.method,
    )
    for target in TARGETS
)
TABLES = (
    KnownStatement(
        _ATTENTION,
        "PositionalEncoding",
        "create_pe",
        known=_registered("pe"),
        instead=_PE,
        methods=_PE_METHODS,
    ),
    *(
        KnownStatement(
            _ATTENTION,
            owner,
            "forward",
            known=f"pos_emb = self.pe[:, {rows}]",
            instead=f"pos_emb = self._pe_on(x.device)[:, {rows}]",
        )
        for owner, rows in _POSITIONS.items()
    ),
    _seq_range(_JASPER, "SqueezeExcite", "set_max_len"),
    _seq_range(_CONV, "ConvASREncoder", "update_max_sequence_length"),
    _seq_range(_SQUEEZEFORMER, "SqueezeformerEncoder", "set_max_audio_length"),
    _pad_mask(_SQUEEZEFORMER, "SqueezeformerEncoder"),
    _seq_range(_PUNCTUATION, _PUNCTUATION_OWNER, "set_max_audio_length"),
    _pad_mask(_PUNCTUATION, _PUNCTUATION_OWNER),
)
