"""A script of the grammar as the text of a file. Pure."""

from __future__ import annotations

from .grammar import STEPS, Script

BATCH = 8
GANS = ("gan", "gan_frozen")
MANY = 10_000
"""Parameters where there are many: four tensors each, with AdamW."""

HEAD = '''\
"""A training loop drawn by the soak: {about}"""
import os, sys
import torch, torch.utils.checkpoint, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
import elastic

sys.path.insert(0, os.environ["SOAK_LIB"])
import probe

torch.use_deterministic_algorithms(True)
STEPS = {steps}


class Data(torch.utils.data.Dataset):
    def __len__(self): return 512
    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return x, x.sum().reshape(1)

'''

LAYERS = {
    "extra_tensor": '''\
class Scale(nn.Module):
    """Keeps an amax of its weight as extra state, a tensor, and divides by it."""
    def __init__(self):
        super().__init__()
        self.weight, self.amax = nn.Parameter(torch.ones(16)), torch.ones(())
    def get_extra_state(self): return self.amax.clone()
    def set_extra_state(self, state): self.amax = state.clone()
    def forward(self, x):
        if self.training: self.amax = 0.9 * self.amax + 0.3 * self.weight.detach().abs().max()
        return x * self.weight / self.amax
''',
    "extra_json": '''\
class Warm(nn.Module):
    """Counts its forwards as extra state, a dict, and warms up with them."""
    def __init__(self):
        super().__init__()
        self.calls = 0
    def get_extra_state(self): return {"calls": self.calls}
    def set_extra_state(self, state): self.calls = state["calls"]
    def forward(self, x):
        if self.training: self.calls += 1
        return x * (1 - 0.5 ** (1 + self.calls))
''',
    "hook_clones": '''\
class Cloned(nn.Linear):
    """Its state dict holds copies, as a hook that moves to the CPU or strips a prefix makes them."""
    def __init__(self, *args):
        super().__init__(*args)
        self._register_state_dict_hook(lambda m, held, prefix, meta: held.update(
            {key: value.clone() for key, value in held.items() if key.startswith(prefix)}))
''',
    "converts": '''\
class Halved(nn.Module):
    """Saves its statistics in another type than it keeps them."""
    def __init__(self):
        super().__init__()
        self.total = torch.zeros((), dtype=torch.float32)
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "total"] = self.total.double()
    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.total = state_dict.pop(prefix + "total").float()
        super()._load_from_state_dict(state_dict, prefix, *rest)
    def forward(self, x):
        if self.training: self.total = self.total + 0.125
        return x / (1 + self.total)
''',
    "counter": '''\
class Counter(nn.Module):
    """Counts its forwards in a buffer, in place, and uses the count."""
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
    def forward(self, x):
        if self.training: self.count += 1
        return x * (1 + 1 / (1 + self.count))
''',
    "rebound": '''\
class Averaged(nn.Module):
    """Its buffer is a new tensor after each forward."""
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.register_buffer("mean", torch.zeros(16))
    def forward(self, x):
        if self.training:
            with torch.no_grad(): self.mean = 0.9 * self.mean + 0.1 * self.weight
        return x * self.weight + self.mean
''',
}
"""Classes of their own."""

MAKE = {
    "batchnorm": "nn.BatchNorm1d(16)",
    "dropout": "nn.Dropout(0.2)",
    "spectral": "nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))",
    "spectral_old": "nn.utils.spectral_norm(nn.Linear(16, 16))",
    "extra_tensor": "Scale()",
    "extra_json": "Warm()",
    "hook_clones": "Cloned(16, 16)",
    "converts": "Halved()",
    "counter": "Counter()",
    "rebound": "Averaged()",
    "tied": "nn.Linear(16, 16)",
    "recomputed": "nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1))",
}

OPTIMIZERS = {
    "global": '''\
class Sized(torch.optim.SGD):
    """Keeps what belongs to no parameter in its state, as several do."""
    def step(self, closure=None):
        held = self.state["global"]
        held["steps"] = held.get("steps", 0) + 1
        return super().step(closure)

''',
    "dotted": '''\
class Dotted(torch.optim.Optimizer):
    """A key of its state has a dot."""
    def __init__(self, params, lr): super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad(): loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None: continue
                held = self.state[p]
                held.setdefault("exp.avg", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                p.add_(held["exp.avg"], alpha=-group["lr"])
        return loss

''',
}

CONSTRUCT = {
    "sgd": "torch.optim.SGD({0}, lr=0.05)",
    "momentum": "torch.optim.SGD({0}, lr=0.02, momentum=0.9)",
    "adamw": "torch.optim.AdamW({0}, lr=0.01)",
    "rmsprop": "torch.optim.RMSprop({0}, lr=0.005)",
    "adagrad": "torch.optim.Adagrad({0}, lr=0.02)",
    "lbfgs": "torch.optim.LBFGS({0}, lr=0.1, max_iter=3, tolerance_grad=0, tolerance_change=0)",
    "global": "Sized({0}, lr=0.05)",
    "dotted": "Dotted({0}, lr=0.02)",
}


VALUES = {"top": "0", "end": "0", "late": "0", "list": "[]", "tensor": "torch.zeros(3)"}
"""What a plain value is at first."""

CHANGES = {
    "list": "state.seen.append(state.step)",
    "tensor": "state.seen.mul_(0.9).add_(1.0)",
    **dict.fromkeys(("top", "end", "late"), f"state.seen = state.seen + {BATCH}"),
}
"""How it changes in a step."""


def render(script: Script) -> str:
    """The text; it ends with a newline."""
    parts = [HEAD.format(about=str(script), steps=STEPS)]
    parts += [f"{LAYERS[name]}\n" for name in script.layers if name in LAYERS]
    parts += [OPTIMIZERS[script.optimizer]] if script.optimizer in OPTIMIZERS else []
    parts += [_net(script), _setup(script), _train(script), "elastic.run(setup, train)\n"]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def loop_lines(text: str) -> list[int]:
    """Numbers of the lines of the loop, the `for` included, from 1."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("    for ") and line.endswith("# the loop"))
    last = next(i for i, line in enumerate(lines) if line.startswith("    probe.finish("))
    return [i + 1 for i in range(first, last) if lines[i].strip()]


def _net(script: Script) -> str:
    lines = ["class Net(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines.append("        self.inp, self.out = nn.Linear(8, 16), nn.Linear(16, 1)")
    lines += [f"        self.{name} = {MAKE[name]}" for name in script.layers]
    if "tied" in script.layers:
        lines.append("        self.again = nn.Linear(16, 16); self.again.weight = self.tied.weight")
    if script.no_grad != "none":
        lines.append("        self.gain = nn.Parameter(torch.ones(16))")
    if script.size == "many":
        lines.append(
            f"        self.many = nn.ParameterList([nn.Parameter(torch.full((8,), 0.1)) for _ in range({MANY})])"
        )
    if script.size in ("64mb", "2gb"):
        nbytes = 64 << 20 if script.size == "64mb" else 2 << 30
        lines.append(f"        self.frozen = nn.Parameter(torch.ones({nbytes // 4}), requires_grad=False)")
    lines += ["    def forward(self, x):", "        x = torch.tanh(self.inp(x))"]
    lines += [f"        x = torch.tanh({_applied(name)})" for name in script.layers if name != "dropout"]
    lines += ["        x = torch.tanh(self.again(x))"] if "tied" in script.layers else []
    lines += ["        x = x * self.gain"] if script.no_grad != "none" else []
    lines += ["        x = self.dropout(x)"] if "dropout" in script.layers else []
    lines += ["        x = x + torch.stack(list(self.many)).sum(0).repeat(2)"] if script.size == "many" else []
    lines += ["        x = x * self.frozen[:16]"] if script.size in ("64mb", "2gb") else []
    lines.append("        return self.out(x)")
    return "\n".join(lines) + "\n\n"


def _applied(layer: str) -> str:
    """The call of a layer."""
    if layer == "recomputed":
        return "torch.utils.checkpoint.checkpoint(self.recomputed, x, use_reentrant=False)"
    return f"self.{layer}(x)"


def _optimizers(script: Script) -> dict[str, str]:
    """name -> how it is made, given `state`-less names of the modules."""
    make = CONSTRUCT[script.optimizer]
    if script.loop == "manual":
        return {}
    if script.loop in GANS:
        return {"d_optimizer": make.format("critic.parameters()"), "optimizer": make.format("model.parameters()")}
    if script.loop == "two":
        return {
            "optimizer": make.format("[p for n, p in model.named_parameters() if p.requires_grad and n[:3] != 'out']"),
            "head_optimizer": make.format("model.out.parameters()"),
        }
    params = "[p for p in model.parameters() if p.requires_grad]" if script.size != "small" else "model.parameters()"
    return {"optimizer": make.format(params)}


def _setup(script: Script) -> str:
    lines = ["def setup(job):", "    torch.manual_seed(7)", "    model = Net()"]
    parts = ["model=model"]
    if script.loop in GANS:
        lines.append("    critic = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))")
        parts.append("critic=critic")
    if script.optimizer_in == "state":
        for name, made in _optimizers(script).items():
            lines.append(f"    {name} = {made}")
            parts.append(f"{name}={name}")
    if script.scheduler != "none":
        made = "StepLR(optimizer, 3, 0.5)" if script.scheduler == "step" else "ReduceLROnPlateau(optimizer, patience=1)"
        parts.append(f"scheduler=torch.optim.lr_scheduler.{made}")
    if script.ema:
        average = "torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)"
        parts.append(f"ema=torch.optim.swa_utils.AveragedModel(model, multi_avg_fn={average})")
    parts += [f"seen={VALUES[script.value]}"] if script.value != "none" else []
    parts += ['scaler=torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)'] if script.loop == "amp" else []
    return "\n".join([*lines, f"    return elastic.State({', '.join(parts)})"]) + "\n\n"


def _train(script: Script) -> str:
    lines = ["probe.start(job, state)", "model = job.ddp(state.model)"]
    if script.loop in GANS:
        lines.append("critic = job.ddp(state.critic)")
    names = list(_optimizers(script))
    if script.optimizer_in == "state":
        lines += [f"{name} = state.{name}" for name in names]
    else:
        made = {n: m.replace("model.", "state.model.").replace("critic.", "state.critic.")
                for n, m in _optimizers(script).items()}  # fmt: skip
        lines += [f"{name} = {how}" for name, how in made.items()]
    if script.data == "batches":
        micro = ", micro_batch=2" if script.accumulate > 1 else ""
        lines.append(f"for batch in job.batches(Data(), state, batch_size={BATCH}, steps=STEPS{micro}):  # the loop")
    else:
        lines.append("for step in range(state.step, STEPS):  # the loop")
    lines += [f"    {line}" for line in _loop(script)]
    held = ["model=state.model"] + (["critic=state.critic"] if script.loop in GANS else [])
    held += [f"{name}={name}" for name in names]
    held += ["scheduler=state.scheduler"] if script.scheduler != "none" else []
    held += ["ema=state.ema"] if script.ema else []
    held += ["seen=state.seen"] if script.value != "none" else []
    held += ["scaler=state.scaler"] if script.loop == "amp" else []
    lines.append(f"probe.finish(job, state, {', '.join(held)})")
    return "\n".join(["def train(job, state):", *(f"    {line}" for line in lines)]) + "\n\n"


def _loop(script: Script) -> list[str]:
    lines = []
    if script.data == "batches":
        lines.append("x, y = batch.x, batch.y")
    else:
        lines.append("torch.manual_seed(64 * step + job.rank)")
        lines.append(f"x = torch.randn({BATCH // 2}, 8)")
        lines.append("y = x.sum(1, keepdim=True)")
    if script.train_mode == "top":
        lines.append("state.model.train()")
    if script.value in ("top", "list", "tensor"):
        lines.append(CHANGES[script.value])
    if script.no_grad == "top":
        lines += ["with torch.no_grad():", "    state.model.gain.mul_(0.99)"]
    lines += BODIES.get(script.loop, _plain)(script)
    lines += _after(script)
    if script.evaluate == "before":
        lines += _evaluate(script)
    if script.value == "end":
        lines.append(CHANGES[script.value])
    lines.append("job.commit(state, loss=loss)")
    if script.value == "late":
        lines.append(CHANGES[script.value])
    if script.evaluate == "after":
        lines += _evaluate(script)
    return lines


def _backward(script: Script) -> list[str]:
    if script.sync == "flag":
        return [
            "for number, (part_x, part_y) in enumerate(zip(x.chunk(2), y.chunk(2))):",
            "    model.require_backward_grad_sync = number == 1",
            "    loss = F.mse_loss(model(part_x), part_y) / 2",
            "    loss.backward()",
        ]
    if script.accumulate > 1:
        return [
            "for part in batch.parts():",
            "    loss = F.mse_loss(model(part.x), part.y)",
            "    loss.backward()",
        ]
    return ["loss = F.mse_loss(model(x), y)", "loss.backward()"]


def _clip(script: Script) -> list[str]:
    return ["torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)"] if script.clip else []


def _mean() -> list[str]:
    return ["mean = loss.detach().clone()", "dist.all_reduce(mean)", "mean /= job.world_size"]


def _plain(script: Script) -> list[str]:
    names = list(_optimizers(script))
    lines = [*_backward(script), *_clip(script)]
    lines += _mean() if script.log == "before" else []
    lines += [f"{name}.step()" for name in names]
    return lines + [f"{name}.zero_grad()" for name in names]


def _closure(script: Script) -> list[str]:
    inner = ["optimizer.zero_grad()", "loss = F.mse_loss(model(x), y)", "loss.backward()", *_clip(script)]
    if script.loop == "lbfgs":  # every rank must see the same loss, or they stop at different evaluations
        inner += [*_mean(), "return mean"]
    else:
        inner += [*(_mean() if script.log == "before" else []), "return loss"]
    return ["def closure():", *(f"    {line}" for line in inner), "loss = optimizer.step(closure)"]


def _gan(script: Script) -> list[str]:
    bce, ones = "F.binary_cross_entropy_with_logits", "torch.ones_like(y)"
    return [
        *(["state.critic.requires_grad_(True)"] if script.loop == "gan_frozen" else []),
        "fake = model(x)",
        "judged = critic(torch.cat([y, fake.detach()]))",
        f"{bce}(judged, torch.cat([{ones}, torch.zeros_like(y)])).backward()",
        "d_optimizer.step()",
        "d_optimizer.zero_grad()",
        *(["state.critic.requires_grad_(False)"] if script.loop == "gan_frozen" else []),
        f"loss = {bce}(state.critic(fake), {ones})",
        "loss.backward()",
        *_clip(script),
        *(_mean() if script.log == "before" else []),
        "optimizer.step()",
        "optimizer.zero_grad()",
        "d_optimizer.zero_grad()",
    ]


def _amp(script: Script) -> list[str]:
    scaled = [
        'with torch.autocast("cpu", dtype=torch.bfloat16):',
        "    loss = F.mse_loss(model(x).float(), y)",
        "state.scaler.scale(loss).backward()",
    ]
    if script.accumulate > 1:
        text = [line.replace("(x)", "(part.x)").replace(", y)", ", part.y)") for line in scaled]
        scaled = ["for part in batch.parts():", *(f"    {line}" for line in text)]
    return [
        *scaled,
        *(_mean() if script.log == "before" else []),
        "state.scaler.step(optimizer)",
        "state.scaler.update()",
        "optimizer.zero_grad()",
    ]


def _manual(script: Script) -> list[str]:
    return [
        *_backward(script),
        *_clip(script),
        *(_mean() if script.log == "before" else []),
        "with torch.no_grad():",
        "    for p in state.model.parameters():",
        "        if p.grad is not None: p.add_(p.grad, alpha=-0.05)",
        "state.model.zero_grad()",
    ]


BODIES = {
    "closure": _closure, "lbfgs": _closure, "gan": _gan, "gan_frozen": _gan, "amp": _amp, "manual": _manual,
}  # fmt: skip
"""From the forward to the step."""


def _after(script: Script) -> list[str]:
    lines = ["state.ema.update_parameters(state.model)"] if script.ema else []
    if script.no_grad == "clamp":
        lines += ["with torch.no_grad():", "    state.model.gain.mul_(1.01).clamp_(0.5, 2.0)"]
    if script.log == "after" or (script.scheduler == "metric" and (script.log == "none" or script.loop == "closure")):
        lines += _mean()
    if script.scheduler == "step":
        lines.append("state.scheduler.step()")
    if script.scheduler == "metric":
        lines.append("state.scheduler.step(float(mean))")
    return lines


def _evaluate(script: Script) -> list[str]:
    back = ["    state.model.train()"] if script.train_mode == "eval" else []
    return [
        "if state.step % 3 == 0:",
        "    state.model.eval()",
        '    with torch.no_grad(), job.quiet("evaluation", 20.0):',
        "        score = F.mse_loss(state.model(x), y)",
        "        dist.all_reduce(score)",
        *back,
    ]
