"""Training frameworks under elastic: a lost worker is replaced in place, and the framework's own loop goes on.

    elastic.integrations.transformers     Trainer, Seq2SeqTrainer, TrainingArguments (Hugging Face transformers)
    elastic.integrations.accelerate       Accelerator (Hugging Face accelerate)
    elastic.integrations.lightning        ElasticStrategy for lightning.Trainer, fabric (Lightning)

Each module imports its framework; nothing else of elastic does. See docs/frameworks.md.
"""
