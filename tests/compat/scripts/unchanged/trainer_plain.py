"""A Hugging Face Trainer that knows nothing of elastic: it saves each 20 steps and resumes from its last checkpoint."""

import probe
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

LENGTH, STEPS = 32, 80


class Sorted(Dataset):
    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(index)).sort().values
        return {"input_ids": ids, "labels": ids}


class Probe(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        probe.step(state.global_step)


def main() -> None:
    out = probe.FOLDER / "out"
    args = TrainingArguments(
        output_dir=str(out), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=STEPS,
        lr_scheduler_type="cosine", logging_steps=20, save_steps=20, save_total_limit=2, report_to=[],
        disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    set_seed(1)
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
    ))  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=Sorted(), callbacks=[Probe()])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(out)) if out.exists() else None)
    probe.final(model.parameters())


if __name__ == "__main__":
    main()
