"""Lightning under elastic: `Trainer(strategy=ElasticStrategy())`, and `fabric(job)` for a loop of Fabric's.

`Trainer.fit` runs in `elastic.run`: the model, its optimizers, their schedulers, the gradient scaler, the loops'
counters and the callbacks' states are the job's State, and every optimizer step is a commit. When a generation ends,
the loops and the strategy's wrappers are made anew around the same model and optimizers, and training goes on after the
last commit.

What follows a step's commit runs again after a recovery: the checkpoint callbacks at this step, the validation, the end
of the epoch. All of it sees the state as of the commit, so it comes to the same result.
"""

from ._versions import require

require("lightning", "2.6", "2.7")

from ._lightning_fabric import fabric  # noqa: E402
from ._lightning_strategy import ElasticStrategy  # noqa: E402

__all__ = ["ElasticStrategy", "fabric"]
