"""Hugging Face's Trainer, with one changed import: a killed worker costs no step.

elasticctl run --workers 2 --checkpoints ckpt examples/hf_trainer.py

Needs, in a clone: pip install '.[embedded,transformers]'
"""

import argparse
import inspect

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from elastic.integrations.transformers import Trainer, TrainingArguments  # in place of transformers'

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--output", default="out", help="folder for what Trainer saves")
ARGS = parser.parse_args()


class Lines(torch.utils.data.Dataset):
    """The source of torch's optimizers, line by line, as bytes."""

    def __init__(self):
        self.lines = [line.encode()[:32] for line in inspect.getsource(torch.optim.AdamW).splitlines() if line]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        ids = torch.tensor(list(self.lines[index].ljust(32)))
        return {"input_ids": ids, "labels": ids}


def main():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=ARGS.width, n_layer=2, n_head=2)
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=ARGS.output,
            per_device_train_batch_size=8,
            max_steps=ARGS.steps,
            logging_steps=25,
            save_strategy="no",  # elastic's checkpoints are in the folder of --checkpoints
            disable_tqdm=True,
            report_to=[],
        ),
        train_dataset=Lines(),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
