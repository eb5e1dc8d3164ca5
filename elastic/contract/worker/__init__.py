"""What a worker and its agent share: messages, the beat page, environment variables, tables of tensors."""
