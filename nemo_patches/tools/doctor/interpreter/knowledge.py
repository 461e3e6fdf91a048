"""What is known by name: of torch, Lightning, NeMo, and of what people call things. No code."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nemo_patches.tools.doctor.syntax import words


@dataclass(frozen=True)
class CollectiveKind:
    """A kind of collective. owners: where it is from, or what its owner is (collectives.py)."""

    owners: tuple[str, ...]
    why: str
    guess: str
    pairs_with: str


# Where it is from, or what its owner is | names | why it is a collective | what must hold for that
# | what it pairs with, if not with its name. Of owners: a.b a module; =a.b its whole name; @part a
# word of its name's last part; others what is known of its value, its class or its file.
COLLECTIVES = """
torch.distributed,deepspeed.comm,dist.,distributed. |
    all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce
    all_reduce_coalesced all_to_all all_to_all_single barrier broadcast broadcast_object_list
    gather gather_object init_device_mesh initialize_mesh_device monitored_barrier new_group
    reduce reduce_scatter reduce_scatter_tensor scatter scatter_object_list
    | | |
torch.distributed.checkpoint |
    async_save get_model_state_dict get_optimizer_state_dict get_state_dict load
    load_state_dict save save_state_dict set_model_state_dict set_optimizer_state_dict
    set_state_dict
    | in which all ranks take part | |
mmengine.dist,mmcv.runner,mmdet.core,mmdet.apis,detectron2.utils.comm,ignite.distributed,
    composer.utils.dist,timm.utils |
    all_gather all_gather_object all_reduce all_reduce_dict all_reduce_params allreduce_params
    barrier broadcast broadcast_object_list collect_results collect_results_cpu
    collect_results_gpu distribute_bn gather gather_object reduce_dict reduce_tensor
    shared_random_seed sync_random_seed synchronize
    | in which all ranks take part | |
megatron. | load_checkpoint save_checkpoint | in which all ranks take part | |
* | GatheredParameters consolidate_state_dict distribute_module distribute_tensor
    full_optim_state_dict full_tensor optim_state_dict redistribute
    scatter_full_optim_state_dict sharded_optim_state_dict summon_full_params unshard
    | which gathers sharded parameters | |
* | optim_state_dict_to_load | | the state is sharded, or on rank 0 alone |
accelerate.utils. | broadcast broadcast_object_list gather gather_object pad_across_processes
    reduce | | |
@accelerator | gather gather_for_metrics reduce wait_for_everyone | | |
@accelerator | get_state_dict save_model save_state
    | | the model is sharded, by FSDP or DeepSpeed |
@fabric | all_gather all_reduce barrier broadcast save | | |
@pl_module,=self+lightning | all_gather | | |
@strategy,@training_type_plugin | all_gather barrier broadcast reduce reduce_boolean_decision
    | | |
@trainer+trains | fit predict save_checkpoint test validate
    | which waits for all ranks | |
@trainer+transformers | evaluate | which waits for all ranks | |
@engine+parallel | save_16bit_model save_checkpoint save_fp16_model
    | which all ranks of DeepSpeed save in | |
lightning.,pytorch_lightning. | EarlyStopping ModelCheckpoint
    | which has collectives in its hooks | |
@model+zero 3 | from_pretrained | which shards its parameters as they are loaded | |
=self+saves,@callback+lightning,@checkpoint+lightning |
    _save_checkpoint _save_last_checkpoint _save_monitor_checkpoint
    _save_none_monitor_checkpoint _save_topk_checkpoint | which waits for all ranks | |
fsdp | clip_grad_norm_ | which reduces the norm of sharded gradients | |
metric | compute | which gathers the metric from all ranks | |
@acc+measures,@accuracy+measures,@auroc+measures,@bleu+measures,@cer+measures,@f1+measures,
    @metric+measures,@metrics+measures,@wer+measures | compute
    | which gathers the metric from all ranks | |
@acc,@accuracy,@auroc,@bleu,@cer,@f1,@metric,@metrics,@wer | compute
    | which gathers the metric from all ranks | it is a metric of torchmetrics |
fsdp | state_dict | which gathers sharded parameters | |
@model+sharded | state_dict | which gathers sharded parameters | the model is wrapped in FSDP |
fsdp,@engine+zero,=engine.module+zero | generate
    | which gathers sharded parameters until this rank's own sequences end
    | a rank whose sequences end sooner does not wait for the others | generate
=super()+nemo,nemo.collections. | forward test_step training_step validation_pass validation_step
    | which runs NeMo's encoder | | encoder
=self+nemo | forward | which runs NeMo's encoder | | encoder
=self | manual_backward | which reduces the gradients | | backward
@accelerator,@fabric | backward | | | backward
lightning,parallel | backward | which reduces the gradients | | backward
=self+sharded,=self+ours | encoder perception pre_encoder | | | encoder
"""
IN_A_GROUP = "the ranks of its group have batches of their own"
# A call of a wrapped module: why it is a collective, and what must hold where that is not sure.
ON_FSDP = (
    "which gathers sharded parameters",
    "the module is sharded, which a test decides",
)
ON_DDP = (
    "whose gradients are reduced",
    "the model has buffers, which are broadcast at each call",
)
NOT_FOR_BACKWARD = "whose result is not used, so that no gradients are reduced"
# Layers with parameters, and what is said of a call of theirs.
LAYERS = (
    r"^torch\.nn\.\w*(Attention|Conv\dd|Embedding|GRU|LSTM|Linear|Norm\w*|Sequential"
    r"|Transformer\w*)$|"
    r"^transformers\.(?!\w*(?:Config|Extractor|Processor|Tokenizer))\w+\.from_pretrained$"
)
# What becomes one that asks all ranks, and is one.
BATCH_NORM = r"^torch\.nn\.(Sync)?BatchNorm"
LAYER_AT = re.compile("layer at ")  # a tag: and where it is made
WEIGHTS = "for whose gradients DDP waits"
OF_NORM = "which gathers the statistics of its batch norm from all ranks"
LOG_SYNCED = "which reduces over all ranks by sync_dist"
NOT_YET = "a batch comes that is longer than what the buffer was made for, and not on all ranks"
LISTED = "which a metric gathers from all ranks, item by item"
LOG_OF_METRIC = "which gathers a metric from all ranks"
_OF_ALL = "which every rank must set, or none"
SHARED_SETTINGS = dict.fromkeys(
    words("""
        should_epoch_stop should_evaluate should_stop should_training_stop stop_training
        """),
    _OF_ALL,
)
# What a hook of Lightning returns to leave the rest of the epoch out.
ENDS_EPOCH = (
    "on_train_batch_start",
    -1,
    "which ends the epoch, on every rank or on none",
)
_OF_LOGS = (
    "metrics",
    "which reduces what was logged",
    "a metric in it was logged with sync_dist, and has not been reduced yet",
)
# all_to_all_single's arguments by their places: the last two are how much each rank sends.
SIZES_OF = ("output", "input", "output_split_sizes", "input_split_sizes")
# Properties of a trainer: what each pairs with, why, and what must hold.
PROPERTIES = {
    "log_dir": ("broadcast", "which broadcasts rank 0's folder", ""),
    "callback_metrics": _OF_LOGS,
    "logged_metrics": _OF_LOGS,
}
# Those that read what they are given, or leave their result on one rank.
READING = words("""
    all_gather all_gather_into_tensor all_gather_object gather gather_for_metrics gather_object
    reduce
    """)
# Of what a collective is given, that which it says nothing about.
SETTINGS = words(
    "async_op device device_ids dst group group_dst group_src op src timeout"
)
AGREEING = words("""
    across agree agreed all_gather all_reduce allgather allreduce broadcast consensus dist
    distributed gather gathered rank ranks reduce reduced sync synced synchronize world
    """)
# Of packages in which the same words say nothing of ranks.
OF_ONE_RANK = r"^((einops|functools|itertools|numpy)\.|torch\.(?!distributed\.))"
# What wraps a module for several ranks, what it makes of it, and a part of where it is from.
WRAPPERS = {
    "DistributedDataParallel": ("ddp", ""),
    "DDP": ("ddp", ""),
    "FullyShardedDataParallel": ("fsdp", ""),
    "FSDP": ("fsdp", ""),
    "fully_shard": ("fsdp", ""),
    "auto_wrap": ("fsdp", "fsdp"),
    "wrap": ("fsdp", "fsdp"),
    "initialize": ("ddp", "deepspeed"),
}
# What a module stays that module through.
CONVERTING = words("compile convert_sync_batchnorm")
SYNCED_NORMS = words("SyncBatchNorm convert_sync_batchnorm")
DDP = words("DistributedDataParallel DDP")
# What a class makes, whatever it is called: as COLLECTIVES has its owner.
MAKERS = {"Accelerator": "@accelerator", "Fabric": "@fabric", "Trainer": "@trainer"}
GROUP_OF_A_WRAPPER = ("process_group", "pg_collection")
SHARDING = words("FullyShardedDataParallel FSDP fully_shard")
# Files in which the backward pass reduces the gradients: those that name one of these, or make a
# group of ranks and reduce no gradient themselves.
REDUCING = words("""
    DistributedDataParallel FullyShardedDataParallel accelerate deepspeed fully_shard
    """)
IN_PARALLEL = REDUCING | {"init_process_group"}
CONTAINERS = words("""
    ModuleList ModuleDict Sequential clone copy deepcopy dict enumerate iter items list next
    reversed sorted tqdm tuple values zip compile to cuda train eval prepare
    """)
# Packages beside which an encoder may be NeMo's, in a file that does not import NeMo.
BESIDE_NEMO = words("""
    accelerate deepspeed einops hydra lhotse librosa lightning megatron nemo numpy omegaconf
    pytorch_lightning scipy soundfile torch torchaudio torchmetrics tqdm wandb
    """)
# What a function gives a model to that it gets back wrapped: until then it is not.
PREPARING = words("parallelize prepare setup shard wrap")
# Packages of the trainers whose methods wait for all ranks.
TRAINERS = words("fabric lightning nemo pytorch_lightning transformers trl")
LIGHTNING_BASES = words("LightningDataModule LightningModule ModelPT")
LIGHTNING_METHODS = words("training_step configure_optimizers validation_step")
ONE_RANK = words("""
    main_process_only master_only on_last_process on_local_main_process on_main_process
    rank_zero_only
    """)
GROUPS = words("new_group new_subgroups new_subgroups_by_enumeration")
GROUP_NAME = r"group|mesh|\bpg\b|_pg\b"
# In the call of a collective: some ranks alone make it, or those of its group have one batch.
ALONE_OR_ALIKE = (
    r"(?<![a-z])(context|cp|mesh|model|mp|pipeline|pp|sequence|sp|tensor|tp)(?![a-z])"
    r"|new_\w*group|no_dist|use_local_synchronization"
)
LOGS = words("self.log self.log_dict pl_module.log pl_module.log_dict")

# What a name says on a member, by its last part; source_file.py has what each line says.
SOURCES = {
    "rank": words("""
        get_global_rank get_local_rank get_rank get_world_rank global_rank local_process_index
        local_rank node_rank process_index rank world_rank
        """),
    "first rank": words("""
        is_first_rank is_global_primary is_global_rank_zero is_global_zero is_local_main_process
        is_local_process_zero is_main is_main_process is_main_rank is_master is_master_process
        is_master_rank is_primary is_rank0 is_rank_0 is_rank_zero is_world_process_zero main_process
        master_process
        """),
    "last rank": words("is_last_process is_last_rank"),
    "ranks": words("""
        data_parallel_size data_parallel_world_size ddp_world_size distributed_world_size dp_size
        dp_world_size get_data_parallel_world_size get_num_processes get_world_size n_procs nprocs
        num_gpus num_processes num_replicas world world_size
        """),
    "ranks of a node": words("""
        devices_per_node get_local_world_size gpus gpus_per_node local_world_size n_gpus
        ngpus_per_node nproc_per_node num_devices num_gpus_per_node
        """),
    "nodes": words("n_nodes nnodes nodes num_nodes"),
    "one rank": words("is_single_gpu is_single_process single_gpu single_process"),
    "several ranks": words("""
        ddp ddp_enabled dist_enabled distributed distributed_enabled is_ddp is_dist
        is_dist_avail_and_initialized is_dist_initialized is_distributed
        is_distributed_initialized is_multi_gpu is_torch_distributed multi_gpu use_ddp use_dist
        use_distributed using_ddp is_available is_initialized is_torchelastic_launched
        """),
    "distributed type": words("distributed_type"),
    "not distributed": words("NO"),
    "rank's text": words("""
        $RANK $LOCAL_RANK $NODE_RANK $GROUP_RANK $SLURM_PROCID $SLURM_LOCALID
        $OMPI_COMM_WORLD_RANK
        """),
    "ranks' text": words("$WORLD_SIZE $SLURM_NTASKS $OMPI_COMM_WORLD_SIZE"),
}
# Of these only those of torch.distributed and alike.
READY = words("is_available is_initialized is_torchelastic_launched NO")
READY_OWNERS = ("dist", "distributed", "comm", "DistributedType")

# Levels of what has a name only.
DATA_NAMES = words("""
    audio audios batch batches chunks data example examples feats features images input inputs
    items labels len length lengths lens logits losses loss mel metrics mels output outputs outs
    preds predictions sample samples segments signal signals spec target targets tokens
    transcripts wav wavs waveform waveforms x xs y results
    """)
OTHER_NAMES = words("""
    by cfg config dataloader dim dir dl dtype fn func id idx index key kind limit loader max min
    mode name nb num only path rate scale size step type weight weights use with is has return no
    """)
# What a logger runs at each record, by what it is added by, and what makes records.
HANDLERS = {"addFilter": "filter", "addHandler": "emit", "basicConfig": "emit"}
RECORDS = words("critical debug error exception info log warn warning")
# What deals something out to ranks, in shares that differ by one.
DEALING = words("array_split shard split_between_processes split_dataset_by_node")
# Samplers that give each rank as many items, of its own.
EVEN_SAMPLERS = words(
    "DistributedSampler DistributedSamplerWrapper OrderedDistributedSampler"
)
# Objects that decide by what they have been given.
HOLDING = words("early meter monitor patience stop stopper stopping tracker")
LOSSES = words("loss losses")
BATCHES = words("batch batches data sample samples")
LOADERS = words("dataloader dl loader loaders")
LOADED = LOADERS | words("batches dataset iterator")
MODEL = words("""
    tensors bias buf buffer buffers grad gradient gradients grads model module norm optimizer p
    param parameters params state weight weights
    """)
OF_SETTINGS = words("args cfg conf config hparams opts")
PARTS_OF_MODELS = words("blocks layers modules parameters params")
GRADIENTS = words("grad grads gradient gradients")
GROUP_WORDS = words("group groups mesh pg")
PLAIN_TYPES = words("bool float int str")
READ_OFF = words("""
    all any count_nonzero isfinite isinf isnan item len max mean min nelement nonzero norm numel
    size sum tolist
    """)
# What a pattern finds in a text.
FINDING = words("findall fullmatch match search")
# What is asked of tensors of data alone.
COUNTING = words("bincount histc")
# What takes items by their numbers, which come second.
SELECTING = words("Subset select")
SIZES = words("nelement numel size")
# Arguments of a callback of transformers or a hook of MMEngine, which its trainer has reduced.
GIVEN_REDUCED = words("Hook TrainerCallback")
REDUCED = words("logs metrics")
SEEDING = words("manual_seed manual_seed_all seed seed_all seed_everything set_seed")
FILES = words("glob rglob iterdir scandir exists is_dir is_file isdir isfile listdir")
OF_PROCESS = (
    r"(datetime\.now|monotonic|perf_counter|random\.random|random\.uniform|random\.rand"
    r"|random\.randint|time\.time|torch\.rand"
    r"|cuda\.(mem_get_info|(max_)?memory_(allocated|reserved))|psutil\.virtual_memory"
    r"|disk_usage|statvfs|getloadavg|gethostname|platform\.node|subprocess\.(call|run)|os\.system"
    r"|(fut|future|job|task|thread)\.(done|is_alive)|(proc|process)\.(is_alive|poll))$"
)
# A test of a batch's number of samples.
_SAMPLES = r"(shape\[0\]|size\(0\)|size\(\)\[0\]|len\([\w.]+\))"
_LAST_BATCH = _SAMPLES + r" *[<>!=]=? *[\w.]*(batch_?size|\bbsz?\b)"
STRUCTURE = words("""
    callable dim getattr hasattr id is_floating_point isinstance issubclass type
    """)
# Attributes that have one form on all ranks, and parameters.
OF_FORM = words("""
    bias device dtype grad is_complex is_cuda is_leaf is_meta is_sparse itemsize layout ndim
    requires_grad training weight
    """)
# Of a method that is asked of data: its answer may differ.
PLAUSIBLE = GRADIENTS | words("""
    bad corrupt empty finite inf invalid nan stop stopped stopper stopping valid
    """)
# Methods of a batch whose results have as many items.
ALL_ITEMS = words("""
    bfloat16 bool clone contiguous cpu cuda detach double float half long split to tolist unbind
    """)
PASSED_ON = words("deque enumerate fromkeys iter list reversed sorted tqdm tuple")
SAME_COUNT = words("chunk items keys named_parameters parameters tensor_split values")
# Calls of which it is known what items they give.
GIVING_ITEMS = PASSED_ON | SAME_COUNT | {"islice", "range", "zip"}
TEXTS = words("classes columns fields key keys labels name names")
OF_SETS = words("copy difference intersection symmetric_difference union")
DICTS = words("Counter OrderedDict defaultdict dict")
ADDING = words("append extend add put put_nowait")
QUEUES = words("q queue")
TAKING = words("get get_nowait pop popleft remove")
# Errors that all ranks have, if one has them.
ALL_RANKS = words("""
    AssertionError AttributeError ConnectionError FileNotFoundError ImportError KeyError
    KeyboardInterrupt LookupError ModuleNotFoundError NameError NotImplementedError OSError
    OverflowError StopIteration SystemExit TimeoutError TypeError UnicodeDecodeError Empty Full
    """)
# Of a trainer: what runs a whole program, and fails where that does.
RUNNING = words("evaluate fit predict test validate")
# Methods that are called on one rank when it has an error, or lets go of an object.
HOOKS = {
    "on_exception": "the rank that has an error: the others wait elsewhere",
    "__del__": "each rank when its own collector comes to it: no two at one moment",
}
HARMLESS = words("float getattr int len")
ALARMS = words("signal.alarm signal.setitimer")
# Locks of processes, of which one has it at a time.
LOCKS = r"(FileLock|InterProcessLock)$|^portalocker\.\w*Lock$"
FILE_LOCKS = words("fcntl.flock fcntl.lockf portalocker.lock portalocker.unlock")
# Of what ranks make in a loop of another function that serves a rank.
NOT_SERVED = "no rank waits for it in the loop of this file that serves it"
# What runs a function in a thread, and what waits for it.
THREADS = words("Thread run_in_executor submit to_thread")
WAITS = words("join result wait")
PROCESS_ENDS = words("sys.exit exit quit os._exit os.abort")
# A method in which all ranks take part, or the others of a rank; not torch's own.
SOUNDS_COLLECTIVE = (
    r"^(?!torch\.|.*\bdist\.|.*distributed\.).*"
    r"\.\w*((all|other)_ranks|all_?gather|all_?reduce|barrier|receive|recv"
    r"|broadcast(?!_to|_tensors))[^.]*$"
)
# What another file's function agrees on, by its name: its first argument, in place.
AGREES_IN_PLACE = r"^_?(all_?reduce|broadcast)(_object_list|_tensors?)?_?$"
# What makes a tensor of the size that it is given.
SIZED = words("""
    arange empty eye full linspace new_empty new_full new_ones new_zeros ones rand randn zeros
    """)
NEW_TENSORS = words("torch.tensor torch.zeros torch.as_tensor")
# A test of what word a batch has.
WORD_OF_BATCH = r"\b(batch|batches|data|samples?)(\[[^\]]*\])+ (==|!=|in|not in) [^\d-]"
# A test of which fields an item has, which are mostly those of all.
FORM_OF_ITEM = r"'\w+' (not )?in |^(not \()?[\w.]+(\[[^\]]*\])* is (not )?None|\.get\("
# What must hold for ranks to differ in a test that they mostly agree in, by what the test says.
NO_GRADIENT = r"\bgrads\b|\bgrad\w*\b.{0,12} is (not )?None"
NO_BATCH = r"\b(batch(es)?|data|samples?) is (not )?None\b"
BY_SAMPLER = "a sampler of this file's"
OTHER_FILES = "the ranks' hosts, or moments, see other files"
GUESSES = {
    BY_SAMPLER: "the sampler gives the ranks batches of unlike kinds at one step",
    NO_GRADIENT: "a rank's batches leave parameters without a gradient",
    r"\brandom\b|\brand\(": (
        "the ranks draw other random numbers, as they do without a seed"
    ),
    _LAST_BATCH: "the ranks' last batches are of unlike sizes, as without a DistributedSampler",
    r"\bnext\b": "the ranks' iterators end after unlike numbers of batches",
    NO_BATCH: "the loader gives some ranks None for a batch",
    r"\bfile\b|exists\(|is_file\(|isfile\(|is_dir\(|isdir\(|listdir\(": (OTHER_FILES),
}
# A test on the wrapper, which its file's callers may have settled: also beside one on the rank.
OF_WRAPPERS = {
    r"(\btype\([\w.]+\) is not|\bnot isinstance\([\w.]+,) [\w.]*\b("
    + "|".join(WRAPPERS)
    + r")\b": "a model that is not wrapped comes here at all",
    r"\brequire_backward_grad_sync\b": (
        "that rank's other backward passes have not reduced the gradients already"
    ),
}
# Context managers in which rank 0 goes first, and the others wait at a barrier.
FIRST = words("main_process_first local_main_process_first")
WITHOUT_GRADIENTS = r"\b(no_grad|inference_mode|set_grad_enabled\(False)"
# Errors that end a trial, and not the job.
ENDS_A_TRIAL = words("TrialPruned")
# What lets ranks end a loop one after another.
JOINS = r"(\bJoin|\.join|join_uneven_inputs)\("
# Calls of torch.distributed from one rank to another, and what a rank does in them.
MESSAGES = {
    "send": "send",
    "isend": "send",
    "send_object_list": "send",
    "recv": "recv",
    "irecv": "recv",
    "recv_object_list": "recv",
    "P2POp": "other",
    "batch_isend_irecv": "other",
}
ELSEWHERE = "no other file has its other end"
MESSAGE_OWNERS = ("torch.distributed.", "dist.")
# A class that gathers from all ranks in compute().
METRICS = r"^(torchmetrics\.(?!functional)|nemo\.collections\.\w+\.metrics\.)"
# Of what something is made of, what it has, too.
CARRIED = words("""
    @engine alone batchnorm counted ddp even file fsdp gradient keyed lacks loader metric named next
    own_size perhaps random rank rounded sized text
    """)


def _rows() -> dict[str, list[CollectiveKind]]:
    rows: dict[str, list[CollectiveKind]] = {}
    cells = [each.strip() for each in COLLECTIVES.replace("\n    ", " ").split("\n")]
    for line in filter(None, cells):
        owners, names, why, guess, pairs_with = (
            each.strip() for each in line.split("|")
        )
        row = CollectiveKind(tuple(owners.split(",")), why, guess, pairs_with)
        for name in names.split():
            rows.setdefault(name, []).append(row)
    return rows


ROWS = _rows()
SAID_BY = {name: said for said, names in SOURCES.items() for name in names}
