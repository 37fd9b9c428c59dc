"""One example of every text in twinkle_core/errors, with what a reader needs beside it. Read by tools/generate_errors.py.

``entry(example, ...)`` for each exception class: the examples (all of one class), ``why`` it is raised where the class's own
line does not say enough, and ``way`` out where the text itself does not show one.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinkle_core import errors as e

VENV = "/opt/venv"


@dataclass(frozen=True, slots=True)
class Entry:
    """What the page says of one class."""

    examples: tuple[e.TwinkleError, ...]
    why: str
    way: str


ENTRIES: dict[type[e.TwinkleError], Entry] = {}


def entry(*examples: e.TwinkleError, why: str = "", way: str = "") -> None:
    """Add an entry; its class is that of the examples."""
    (cls,) = {type(example) for example in examples}
    assert cls not in ENTRIES, cls
    ENTRIES[cls] = Entry(examples, why, way)


# ---------------------------------------------------------------------------------------------------- names and plugins

entry(e.UnknownKind("los", "loss", ["losses", "metrics", "models", "..."]), way="Take one of the kinds listed.")
entry(
    e.UnknownName("loss", "losses", "infonse", "infonce", ["cross_entropy", "focal", "infonce"]),
    why="No installed distribution, no `registry.register` of this process and no hook knows the name.",
)
entry(
    e.UnknownClass(str(e.UnknownName("loss", "losses", "FocalLos", "FocalLoss", ["cross_entropy", "focal", "infonce"]))),
    why="The same as [UnknownName](#unknownname), for `from twinkle.loss import FocalLos`.",
)
entry(
    e.NotInstalled("model", "megatron", "MegatronModel", "twinkle-megatron", VENV),
    e.NotInstalled("model", "megatron", "MegatronModel", "twinkle-megatron", VENV, since="0.2.0", installed="0.1.0"),
)
entry(
    e.Broken("loss 'bad' from bad-losses 0.3", "bad_losses:B", "bad-losses", "ModuleNotFoundError: No module named 'gone'"),
    why="Importing an installed component failed. The second line is the plugin's own error. `twinkle plugins --load` finds "
    "all such plugins at once.",
)
entry(
    e.NeedsLibrary("model 'megatron' from twinkle-megatron 0.3", "megatron.core", "twinkle-megatron[mcore]", VENV),
    why="A component or command was found, and a library that it imports was not.",
)
entry(
    e.Ambiguous(
        "loss", "focal", [("acme-losses/focal", "1.2", "acme_losses:F"), ("beta-losses/focal", "2.0", "beta_losses:F")]
    ),
    way="Ask by the qualified name: `set_loss('acme-losses/focal')`. The order of `sys.path` never decides.",
)
entry(
    e.ApiMismatch("loss 'novel' from new-losses 9.0", "new-losses", 2, (1,)),
    why="The plugin states an API version in its metadata that this twinkle-core does not support.",
)
entry(
    e.Disabled("loss 'focal' from acme-losses 1.2"),
    way="Take its distribution out of `TWINKLE_DISABLE_PLUGINS`, or add it to `TWINKLE_PLUGINS`.",
)
entry(
    e.NotA("loss 'focal' from acme-losses 1.2", "Loss", ["__call__(inputs, outputs)"], "acme-losses"),
    e.NotA("loss mine.Duck", "Loss", []),
)
entry(
    e.WrongArgument("InfoNCELoss", "temperatur", "temperature"),
    e.WrongArgument("InfoNCELoss", "zzz", None, ["temperature", "margin"]),
    why="A keyword that a class or function does not have. Arguments are checked when a component is set, not at the first "
    "step.",
)
entry(e.ReservedArgument("AdamW", "params"))
entry(e.MissingArgument("StepLR", ["step_size"]), way="Give it as a keyword: `set_lr_scheduler('step_lr', step_size=100)`.")
entry(e.AlreadyBuilt("loss", "ready", ["temperature"]))
entry(
    e.BadName("loss", "acme/focal", "a name holds no '/'"),
    way="Choose a name that is not empty and holds neither `/` nor `:`.",
)
entry(e.NameTaken("loss", "Focal", "loss 'focal' from acme-losses 1.2"))
entry(e.BadImportPath("loss", "acme_losses:Foccal", "module 'acme_losses' has no attribute 'Foccal'"))
entry(
    e.FrozenRegistry("loss", "os:system", ["twinkle-core/cross_entropy"]),
    why="A server has called `registry.freeze`, so that names from the network resolve in a fixed table only.",
    way="Ask for one of the names allowed, or have the server allow more.",
)
entry(
    e.RemoteCodeRefused("loss", "hf://acme/losses#Focal"),
    e.RemoteCodeRefused("loss", "hf://acme/losses#Focal", "TWINKLE_TRUST_REMOTE_CODE='maybe' is neither yes nor no: it is off"),
)
entry(e.BadRemoteComponent("loss", "hf://acme/losses#Focal", "the package defines CrossLoss, MarginLoss"))
entry(
    e.BadHook("twinkle_after_stop", "twinkle_after_step", "there is no such hook"),
    why="A hook module marks a function with `@hookimpl` whose name or parameters are not a hook's.",
    way="Compare it with [the list of hooks](write_a_plugin.md#all-hooks).",
)
entry(
    e.HookFailed("acme", "acme-losses 1.2", "raised in twinkle_after_step", ValueError("no run is active")),
    e.HookFailed("Norms", "", "raised in twinkle_after_step", ValueError("no run is active")),
    why="A hook module can't be loaded, or a hook raised. Normally a warning, and the training goes on. With "
    "`TWINKLE_STRICT_PLUGINS=1` it is raised.",
)
entry(
    e.WorkerMismatch(3, "node-7", "acme-losses", "1.1", "1.2"),
    e.WorkerMismatch(3, "node-7", "acme-losses", "", "1.2"),
)

# ---------------------------------------------------------------------------------------------------- meshes and runtimes

entry(
    e.BadMesh.size("tp_size", 0),
    e.BadMesh.product({"dp": 2, "tp": 4}, 4),
    e.BadMesh.divides("tp_size", 3, "world size", 8),
    e.BadMesh.device(0),
    e.BadMesh.rank(9, 8),
    e.BadMesh.group("ranks", "four", "a positive number, or a list of different ranks"),
)
entry(
    e.BadLaunch.number("WORLD_SIZE", "two", 1),
    e.BadLaunch.without("RANK", 2),
    e.BadLaunch.outside(5, 2),
    e.BadLaunch.apart(0, 1),
)
entry(
    e.RankFailed(1, 2, "ended with status 1", "Traceback (most recent call last):\n...\nValueError: no such layer"),
    why="A compliance suite ran a model in several processes. What follows is the end of what that process wrote.",
    way="Mend what the traceback shows.",
)
entry(
    e.FailedElsewhere("forward_backward of adapter 'alice'", 1, "BadRow: row 0 has 9 input_ids and 8 labels"),
    why="Ranks compute together, so what one can't do none does. The other rank's own error has its traceback there.",
    way="Mend what that rank's error tells. Other tenants are as they were.",
)
entry(
    e.RanksApart(1, "forward_backward of 'alice'", ["clip_grad_and_step of 'bob'"]),
    e.RanksApart.calls(["save of the base model", *["forward_backward of the base model"] * 3]),
    e.RanksApart.rows(0, [0, 1]),
    e.RanksApart.differently([f"step of the base model with SGD (lr {lr}), CrossEntropyLoss" for lr in (0.1, 0.5)]),
    why="Ranks tell one another what they call where they meet. The verbs that are named are those in which they are now.",
    way="Let all ranks run one script, and none leave out a call because it has no rows, or because it is not the first rank.",
)
entry(
    e.RankLeft("save of the base model", "Connection closed by peer [127.0.0.1]:37142"),
    why="A process that ends closes its connections; what follows is what torch says of that. Or the group's timeout passed.",
    way="Mend the first error, and start all ranks anew.",
)
entry(e.AlreadyInitialized({"mode": "local", "seed": 1}, {"mode": "local", "seed": 2}))
entry(e.NotInitialized("TransformersModel", "actor"))

# ---------------------------------------------------------------------------------------------------- workers elsewhere

entry(e.NoGroups("ray"), way="Say which workers there are, as the text shows.")
entry(e.NoCluster("10.0.0.5:6379", "ConnectionRefusedError: [Errno 111] Connection refused"))
entry(e.DriverIsRank("ray", 2))
entry(e.SameGroup("actor"), way="Give each a name of its own.")
entry(e.UnknownGroup("actr", "actor", ["actor", "reference"]))
entry(
    e.GroupTooLarge(
        "4 CPUs and 4 GPUs",
        "the cluster has 32 CPUs and 2 GPUs",
        "Give smaller groups, or connect to a larger cluster (RAY_ADDRESS)",
    ),
    why="The cluster can't hold the groups; or not now, because other jobs hold what they need.",
)
entry(e.GroupMesh("TransformersModel", 4, "actor", 2))
entry(
    e.WorkerDied(
        "actor", 1, "node-7, process 4711", "forward_backward()", "The actor died unexpectedly before finishing this task."
    ),
    why="The process was killed (by hand, or because memory ran out), or its machine is gone.",
)
entry(
    e.GroupEnded("actor", "worker 1 died during forward_backward()"),
    why="A worker of the group died, or failed alone; the others were ended with it, since they work together.",
)
entry(
    e.WorkerFailed("Odd: 1 and 2", "TypeError: Odd.__init__() missing 1 required positional argument: 'second'"),
    why="An exception that can't be pickled.",
    way="The worker's own traceback is in the note below it.",
)
entry(
    e.NotRemote("this TransformersModel", "modul", None, ["forward_backward", "save", "step"]),
    way="Call what is declared; or declare the method in a class of your own, with `@remote_function`.",
)
entry(e.NotCut("score", "int"))
entry(
    e.NotSent("set_loss()", "loss_cls", "function", "PicklingError: Cannot pickle files that are not opened for reading: w"),
    e.NotSent.answer("judge()", "TypeError: cannot pickle '_thread.lock' object"),
    why="What is given and answered travels pickled, a lambda with all it refers to. A lock can't, nor a file that is written.",
)
entry(e.BadDispatch("score", "[(1,)]", 2))
entry(
    e.NotCollected("score", "flatten", "TypeError: 'int' object is not iterable"),
    way="Return what `collect` asks for, or declare another one.",
)
entry(
    e.ElsewhereObject("this Dataset", "data"),
    why="A proxy was an argument of a component on another group.",
    way="Put both on one group.",
)

# ---------------------------------------------------------------------------------------------------- hubs and data

entry(
    e.HubError("the model could not be found"),
    why="The base of the five errors below. Catch it to treat all of them alike; it is not raised itself.",
    way="See the error that was raised.",
)
entry(
    e.NoSuchPath.missing("./modles/qwen", "/data/modles/qwen", "model", ["models"]),
    e.NoSuchPath.impossible("a\0b", "data set", "embedded null byte"),
    e.NoSuchPath.empty("data/empty", "json, jsonl, csv, tsv, parquet, arrow"),
    way="Correct the path. Relative paths start at the working folder.",
)
entry(e.BareId("Qwen/Qwen3-4B", "model", "/data/Qwen/Qwen3-4B"))
entry(e.BadHubId("hf://Qwen", "model"))
entry(
    e.Unreachable("hf://Qwen/Qwen3-4B", "model", "Hugging Face", False, "[Errno 101] Network is unreachable"),
    e.Unreachable("ms://Qwen/Qwen3-4B", "model", "ModelScope", True, "no snapshot in the cache"),
)
entry(e.NotOnHub("hf://Qwen/Qwen99", "model", "Hugging Face", None, "404 Client Error"))
entry(
    e.DataError.format("notes.docx", "json, jsonl, csv, tsv, parquet, arrow, and folders of these"),
    e.DataError.formats("data", {"json": ["a.jsonl", "b.jsonl"], "csv": ["c.csv"]}),
    e.DataError.encoding("notes.jsonl, byte 17", "invalid start byte"),
    e.DataError.line("notes.jsonl", 12, "Expecting ',' delimiter, column 40"),
    e.DataError.choice("split", "dev", "hf://org/name", ["train", "test"]),
    e.DataError.only("split", "test", "rows.jsonl", "train"),
    e.DataError.part("train[:10%]"),
    e.DataError.loading("rows.parquet", "Parquet magic bytes not found in footer"),
    e.DataError.argument("batch_size", 0, "a whole number from 1 up"),
    e.DataError.not_rows(0, "a text"),
    e.DataError.keys("AlpacaProcessor", ["instruction"], {"question": "Why?", "answer": None}),
    e.DataError.key(7),
    e.DataError.value("AlpacaProcessor", "'output'", 7, "a text"),
    e.DataError.judged("TripletProcessor", "label", 0),
    e.DataError.unknown_texts("TripletProcessor", "hn_negs", "negatives"),
    e.DataError.half_character("abc\ud83d"),
    e.DataError.unkept("Object of type datetime is not JSON serializable"),
    e.DataError.in_the_way("rows.jsonl"),
    e.DataError.in_row("encode", 41, "the row has 9000 tokens, max_length is 8192 (truncation_strategy='raise')."),
    e.DataError.returned("clean", [1, 2]),
    e.DataError.no_template(),
    e.DataError.lazy("split"),
    e.DataError.split_group("negative", 3),
    e.DataError.packed_group(0),
    e.DataError.other_task("dpo", ["messages"], True),
    e.DataError.other_task("sft", ["negative", "positive"], False),
    e.DataError.no_texts("AcmeTemplate"),
    e.DataError.no_anchor(["query", "response"]),
    e.DataError.unsized("shuffle=True"),
    e.DataError.resized(18, 12),
    e.DataError.no_batches(3, "batch_size=8 and drop_last"),
    e.DataError.empty("the data set"),
    e.DataError.encoded("map"),
    e.DataError.not_encoded("packing"),
    why="A file, a row or an argument of a data set can't be used. The text names the file and line, or the row's index.",
    way="Repair the row or drop it (`filter`, or a preprocessor that returns None). `Dataset.check()` lists all rows that the "
    "template would refuse, with the reasons.",
)

# ---------------------------------------------------------------------------------------------------- templates and processors

entry(
    e.TemplateError.at(3, None, "'role' must be a text such as 'user'"),
    e.TemplateError.shape({"text": "hello"}),
    e.TemplateError.rendering("Conversation roles must alternate user/assistant/user/assistant/..."),
    e.TemplateError.role(2, "Assistant", "assistant", ("system", "user", "assistant", "tool", "developer", "function")),
    e.TemplateError.tools(3),
    e.TemplateError.unseen("images", 2),
    e.TemplateError.plain_marks(),
    e.TemplateError.plain_part(1, "assistant", "a call"),
    e.TemplateError.prompt(),
    e.TemplateError.strategy("truncate", ("raise", "left", "right", "split", "delete")),
    e.TemplateError.argument("max_length", 1, "a whole number from 2 up (one token predicts another)"),
    e.TemplateError.tokenizer("./model", "no tokenizer.json"),
    e.TemplateError.slow("./model"),
    e.TemplateError.tokens("./model", ["<｜User｜>", "<｜Assistant｜>"], "v4-0731"),
    e.TemplateError.unreadable(1, "content"),
    e.TemplateError.half_character("smile \ud83d"),
    e.TemplateError.old_call(1, "assistant"),
    why="A conversation that can't be encoded rightly, or a template that can't be built. A message at fault is named by its "
    "index and role.",
    way="Repair the conversation. `template.check(trajectory)` tells the reason without raising.",
)
entry(e.NoChatTemplate("hf://org/base-model"))
entry(
    e.BadCompletion.at_character("r</think>answer", 9, "the end token <｜end▁of▁sentence｜> is missing"),
    e.BadCompletion.at_character("r</think>", 9, "the end token <｜end▁of▁sentence｜> is missing"),
    why="A strict parser read a completion that breaks its format. `error.place` is the character.",
    way="Read it leniently, `template.parse(text)`, or count it as a wrong answer.",
)
entry(
    e.BadMedia.here("message 0, image", "fps=0 is not a number above 0"),
    e.BadMedia.missing("message 0, images[1]", "cat.png"),
    e.BadMedia.remote("message 0, image", "https://example.org/cat.png"),
    e.BadMedia.unopened("image", "message 0, images[0]", "cat.png", "cannot identify image file 'cat.png'"),
    e.BadMedia.kind("image", "message 0, image", 3),
    e.BadMedia.beside("images", "cat.png"),
    e.BadMedia.count("image", "images", "<image>", 2, 1),
    e.BadMedia.unsaid(1),
    e.BadMedia.token(0, "user", "<|image_pad|>"),
    e.BadMedia.shown_otherwise("image", 1, 2),
    e.BadMedia.processor("absolute aspect ratio must be smaller than 200, got 250.0"),
    e.BadMedia.no_places("LlavaProcessor"),
    e.BadMedia.no_times("message 0, video"),
    e.BadMedia.no_split(9000, 8192),
    e.BadMedia.no_processor("./model", "transformers knows no processor for models of type 'qwen2'."),
    way="The first words name the message and the image, a data set's error the row before them. Nothing was encoded.",
)
entry(e.RowTooLong(9000, 8192, "raise"))
entry(
    e.NoLabels.marked(),
    e.NoLabels.untrained(),
    e.NoLabels.short(1),
    e.NoLabels.cut(9000, 512, "right"),
    way="Such a row teaches nothing. Drop it (`truncation_strategy='delete'`), or see that it has an answer.",
)
entry(
    e.BadRow.no_rows(),
    e.BadRow.kind(0, "text"),
    e.BadRow.missing(0, "input_ids", ["messages"]),
    e.BadRow.field(2, "input_ids", "is empty"),
    e.BadRow.length(2, "labels", 7, 8),
    e.BadRow.argument("padding_side", "middle", "'right' or 'left'"),
)

entry(
    e.PatchOrder("FusedMLP", "FusedNorm"),
    why="What the patch changed has been changed again by another one, so what it found can't be put back yet.",
)
entry(
    e.PatchRefused.of_model(
        "ValueHeadPatch", "LlamaForCausalLM", "its adapter 'a' was made without a value head, and would not train it",
        "Apply the patch before add_adapter_to_model",
    ),
    e.PatchRefused.argument("EmbeddingPatch", "pooling", "max", "one of 'last_token', 'mean', 'cls'"),
    why="A patch looks at the model before it changes anything.",
)  # fmt: skip

# ---------------------------------------------------------------------------------------------------- training

entry(e.BadArgument("temperature", 0.0, "a finite number above 0"))
entry(e.BadWindowSize(0), way="Give the number of backwards between two updates: 1, 2, ….")
entry(e.WindowSizeChanged(4, 8, 3))
entry(e.WindowNotStepped(2))
entry(e.NoOptimizer("step", "default"), e.NoOptimizer("step", "default", base_has_one=True))
entry(
    e.NoTrainableParameters("default"),
    way="Unfreeze some (`requires_grad_`), or add an adapter whose `target_modules` match modules of the model, and whose "
    "config does not say `inference_mode=True`.",
)
entry(
    e.BadOptimizer("Mine", "it is not a torch.optim.Optimizer"),
    way="Give a name or a class: then it is built over the right parameters.",
)
entry(
    e.NotInOptimizer("", ["model.embed_tokens.weight"]),
    e.NotInOptimizer("default", ["layers.0.q_proj.lora_A.weight"], window=2),
)
entry(e.BadScheduler("StepLR", "it was made for another optimizer; give its class, with its arguments"))
entry(e.NoForward("backward", "default"))
entry(e.NotInForward("AcmeLoss", ["entropies"], "default"))
entry(e.NoTemplate("default"), e.NoTemplate.of_completions("default"))
entry(e.EmptyBatch(), e.EmptyBatch(4))
entry(
    e.BadInputs("no field of the batch is a tensor; it has input_ids, labels"),
    way="Give a list of encoded rows, one collated batch, or a list of conversations.",
)
entry(e.LabelsMissing("CrossEntropyLoss", ["input_ids", "length"]))
entry(
    e.NotDeclared("AcmeLoss", "entropies", {"logps", "entropies"}, {"logps"}, TypeError("'NoneType' and 'float'"), plain=False),
    e.NotDeclared("quick", "logps", {"logps"}, {"logits"}, AttributeError("'NoneType' has no attribute 'sum'"), plain=True),
)
entry(
    e.BadNeeds.kind("AcmeLoss", "logps"),
    e.BadNeeds.unknown("AcmeLoss", "logprobs", "logps", ["entropies", "logits", "logps", "..."]),
    way="Correct `needs` in the class, or as an attribute of the function.",
)
entry(e.BadMetricResult("AcmeMetric", "NoneType"))
entry(e.BadGroups("PairLoss", [2, 2], 5), way="Correct `groups()` of the loss, or give it rows that come in whole groups.")
entry(e.RowsChanged("advantages", 8, 7), e.RowsChanged(None, 8, 7))
entry(
    e.RowsDisagree([32, 16], 2, 64),
    why="A caller of `lora_linear_many` said how many rows each tenant has, and they are not the rows of the input.",
)
entry(
    e.BadLossArgument(
        "GRPOLoss",
        "advantages",
        "its shape is [3], the batch has 4 rows and labels [4, 128]",
        "one number for each row, or for each token",
    )
)
entry(e.BadLossSetting("CrossEntropyLoss", "label_smoothing", 1.5, "a number, at least 0 and less than 1"))
entry(
    e.BadLossResult("AcmeLoss", "LossOutput whose sum has no graph, so there is nothing to go back through"),
    why="A loss gave something that can't be added over micro-batches and ranks.",
    way="Compute the sum from `outputs`, without `.item()`, `.detach()` or `no_grad`, and give it with the number of items.",
)
entry(
    e.BadLossWeight(-3.0),
    why="The weight of a loss is a count of items (tokens, rows, groups). It may not be negative, NaN or infinite.",
)
entry(e.NonFiniteGradients("default", ["layers.0.mlp.up_proj.lora_A.weight"], 41, 3.2))
entry(
    e.Unsupported("forward", "PipelineEngine", "forward_backward(), which does it all at once"),
    why="Some backends (pipelines) can't run forward and backward apart; some can't generate.",
)

# ---------------------------------------------------------------------------------------------------- adapters

entry(e.UnknownAdapter("defualt", "default", ["default", "other"]), e.UnknownAdapter("default", None, []))
entry(e.WhichAdapter(["a", "b"]))
entry(e.DuplicateAdapter("default"))
entry(e.LoraDisabled("forward_backward", "default"))
entry(e.SlotsFull("c", 2, ["a", "b"]))
entry(e.RankTooLarge("c", "r", 16, 8))
entry(
    e.BadAdapter("default", "target_modules {'q_prj'} match no module of the model"),
    way="Correct the name or the configuration; the model is as it was.",
)

# ---------------------------------------------------------------------------------------------------- checkpoints

entry(e.BadCheckpointName("../step-1", "output"))
entry(e.CheckpointInTheWay("output/notes"))
entry(
    e.CheckpointNotWritten("output/step-100", "No space left on device"),
    why="The disk refused.",
    way="Make room, or save elsewhere (`output_dir=`). The training state is untouched; call `save` again.",
)
entry(
    e.CheckpointNotRead("output/step-100", 0, "checkpoint file 'output/step-100/rng.json' is damaged: it is missing. …"),
    why="Ranks load together: where one can't, none does, rather than wait for it.",
    way="Look at what that rank says; all ranks must see the same folder.",
)
entry(e.CheckpointNotFound("output/step-99"), way="Look which folders `output_dir` holds.")
entry(
    e.CheckpointDamaged(
        "output/step-100/optimizer.safetensors", "its content has changed since it was written (sha256 differs)"
    )
)
entry(
    e.CheckpointMismatch(
        "output/step-100/optimizer.json",
        "it holds the state of the optimizer AdamW, and none is set; call set_optimizer(...) first (or load the weights alone: "
        "resume_only_model=True)",
    ),
    way="Set the session up as the saving run was, or load the weights alone.",
)
entry(
    e.CheckpointUnfit(
        "the state of scheduler Mine", "it holds datetime.date(2026, 1, 1) (date), which is neither number, text nor tensor"
    ),
    why="A state that can't be written. Checkpoints hold no pickles, so an optimizer's or scheduler's state must be numbers, "
    "texts, lists or tensors.",
    way="Keep such values out of `state_dict()`, or save the weights alone (`save_optimizer=False`).",
)

# ---------------------------------------------------------------------------------------------------- backends

entry(
    e.BadGeneration({"temperature": -1.0}, ValueError("`temperature` (=-1.0) has to be a strictly positive float")),
    why="The text after the colon is the library's own.",
    way="Correct the option that it names.",
)
entry(e.Fp8Unavailable())
entry(e.UnknownModelClass("AutoModelForCasualLM", "AutoModelForCausalLM"))
entry(
    e.NoModel("TransformersModel"),
    e.NoModel("TransformersModel", ["model"]),
    way="Name a model: `TransformersModel(model_id='ms://Qwen/Qwen3.5-4B')`.",
)
entry(
    e.ModelNotLoaded("models/qwen", "no file named model.safetensors, or pytorch_model.bin, found"),
    e.ModelNotLoaded.incomplete("models/qwen", "LlamaForCausalLM", ["model.layers.1.mlp.up_proj.weight"], []),
    e.ModelNotLoaded.incomplete("models/qwen", "LlamaForCausalLM", [], ["model.layers.7.mlp.up_proj.weight"]),
    why="A folder that the model's library can't load (the text after the colon is its own), or whose weights are not those of "
    "the model: what is missing would be trained as random numbers.",
    way="Check that the folder is complete and that the installed transformers knows the model.",
)
entry(e.HoldsAdapter("output/last", "hf://Qwen/Qwen3-4B"))
entry(e.UnknownOption("mixed_precision", "bf61", "bf16", ["bf16", "fp16", "no", "fp8"]))
entry(e.ManyProcesses("TransformersModel", 4, 1))
entry(
    e.BadLayout("TransformersModel", "4 attention heads can't be shared by tp_size 3 (4 / 3 = 1.333)"),
    e.BadLayout.divides("MegatronModel", "tp_size", 3, "num_attention_heads", 32),
    way="Choose sizes that divide what the model has.",
)
entry(e.NoDevice("cuda"))
entry(
    e.PackingLeaks(
        "MambaForCausalLM", "a packed row's logits are not what they are alone (4.2%); it has layers with a state that runs on"
    ),
    e.PackingLeaks(
        "LlamaForCausalLM", "positions begin anew inside the rows of a batch of 2; a packed batch is [1, T]", cure=True
    ),
)
entry(
    e.NotComputed("Gemma2ForCausalLM", "hidden", "its logits are not its output layer's output alone; use a loss on logps"),
    way="Choose a loss or metric that needs less, or a model that has it.",
)
entry(e.BadLabels("they are float32, not whole numbers (for a regression: set_loss('mse'))"))
entry(e.WrongType("TransformersModel", "device_mesh", "cuda:0", "a twinkle DeviceMesh"))
entry(
    e.WeightsMismatch(
        "adapter 'default'",
        missing=["layers.1.q_proj.lora_A.weight"],
        misshapen=[("layers.0.q_proj.lora_A.weight", (8, 32), (16, 32))],
    ),
    way="Make the adapter with the configuration it was saved with: `add_adapter_to_model(name, folder)` takes it from there.",
)

entry(
    e.LoadedTooEarly("megatron.core", "twinkle_megatron's stand-ins for CUDA"),
    way="Make the model before anything imports that library, or import it nowhere yourself.",
)
entry(e.ManyLayouts("Layout(tp=2, pp=1, ...)", "Layout(tp=1, pp=2, ...)"))
entry(
    e.OnlyOwn(
        "MegatronModel", "optimizer", "adamw", "weights and states lie in Megatron's buffers", "optimizer('default', lr=...)"
    )
)
entry(
    e.UnsupportedFamily("MegatronModel", "gemma3", "mcore-bridge doesn't know this family", "train it with TransformersModel")
)

# ---------------------------------------------------------------------------------------------------- the command line

entry(e.UnknownCommand("trian", "train", ["quickstart", "train", "plugins", "check", "show", "new", "doctor"]))
entry(e.BadReference("cross_entropy", ["losses", "metrics", "models", "..."]))
entry(e.BadPluginName("json", "'json' is a module of Python's standard library"))
entry(e.FolderExists("acme"))
entry(e.NotWritable("/opt/acme", "Permission denied"))
entry(
    e.UnknownDistribution("acme-loses", False, "acme-losses", ["acme-losses", "twinkle-core"]),
    e.UnknownDistribution("requests", True, None, ["acme-losses", "twinkle-core"]),
)
entry(e.BadTarget("acme_losses:VERSION", "it is a str", ["Loss", "Metric", "..."]))
entry(
    e.UnknownCheck("TestFocal", "test_is_finit", "test_is_finite", ["test_is_finite", "test_is_differentiable", "..."]),
    why="A compliance suite's `expected_failures` names a test that the suite does not have.",
)
entry(
    e.BadSuite.unknown("TestFocal", "pakcing", "packing", ["arguments", "component", "packing", "..."]),
    e.BadSuite.value("TestFocal", "packing", "no", "True or False"),
    why="An option of a compliance suite is misspelt, or its value is of another kind. It is told when the class is made.",
)
entry(
    e.CannotBuild.because("loss", "FocalLoss", "it leaves __call__ of its contract open"),
    e.CannotBuild.without("loss", "FocalLoss", "missing a required argument: 'gamma'"),
    e.CannotBuild.at_each_call("AcmeLoss", ["advantages"]),
)

# ---------------------------------------------------------------------------------------------------- configuration files

entry(e.NoConfigFile("sft.yml"))
entry(e.NoConfigGiven())
entry(
    e.BadConfig(
        "sft.yaml",
        [
            ("line 7", str(e.WrongArgument("AdamW", "learning_rate", None, ["lr", "betas", "eps", "weight_decay", "..."]))),
            ("--dataloader.batch_size", "dataloader.batch_size: must be greater than 0, not 0"),
        ],
    ),
    way="Each line names the place and what is allowed there. `twinkle train --schema` prints all keys.",
)
entry(e.StrayWord("lr"))
entry(e.OutputInUse("output/sft", "checkpoint-20"))
entry(e.NoCheckpoint("output/checkpoint-99"), way="Name one of the folders in `output_dir`, or none.")
entry(e.DataOrderChanged("output/checkpoint-20", "output/data_order.json", [("seed", 42, 7)]))
entry(e.CacheNotWritable("/opt/cache/twinkle", "Read-only file system"))
entry(
    e.UnsupportedGGUF("model.gguf", "general.architecture is 'gemma3', not 'llama'"),
)
