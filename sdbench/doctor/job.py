"""Which job is to be run, as far as the checks have to know it?"""

from __future__ import annotations

import dataclasses

from sdbench.doctor.gpus import count_gpus
from sdbench.ranks.distributed import Ranks


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What follows from the model that the job trains.

    Attributes:
        num_parameters: Weights of U-Net, VAE and text encoder.
        num_trainable: Those that are trained, and therefore have a gradient.
        image_size: Side of the images in pixels.
        text_embedding_dim: Width of the text embeddings.
        images_per_rank: Images of a batch of one rank.
        num_workers: Loader processes of a rank.
    """

    num_parameters: int
    num_trainable: int
    image_size: int
    text_embedding_dim: int
    images_per_rank: int
    num_workers: int


@dataclasses.dataclass(kw_only=True)
class Job:
    """The job, and what the checks have found out about it so far.

    Attributes:
        ranks: The place of this process.
        model_name: Built-in architecture, folder or hub id.
        model_revision: Of a hub id.
        random_weights: Whether weights are drawn instead of loaded.
        image_size: Side of the images in pixels, or None for the default of benchmark.py.
        data_format: A name of `data.SOURCES`, or ``auto``.
        remote: Where the data is, or None.
        local: Where the data is, or its copies are to be kept, or None.
        results_dir: Folder for records.
        batch_size: Global batch, or None for the default of benchmark.py.
        num_workers: Loader processes of a rank, or None for the default of benchmark.py.
        prefetch_factor: Batches that each of them prepares.
        gradient_dtype: ``fp32`` or ``bf16``.
        link_gbps: Nominal speed of the link between the ranks in Gbit/s, or None.
        wandb_project: Project to log to, or None.
        timeout_s: How long a check may take.
        model: Set by the check of the model; None before it and without a model.
    """

    ranks: Ranks
    model_name: str
    model_revision: str | None
    random_weights: bool
    image_size: int | None
    data_format: str
    remote: str | None
    local: str | None
    results_dir: str
    batch_size: int | None
    num_workers: int | None
    prefetch_factor: int
    gradient_dtype: str
    link_gbps: float | None
    wandb_project: str | None
    timeout_s: float
    model: ModelFacts | None = None

    @property
    def ranks_per_node(self) -> int:
        """Ranks that the job will have here: one per GPU, even if the doctor has one per node."""
        return max(self.ranks.local_world_size, count_gpus())

    @property
    def num_ranks(self) -> int:
        """Ranks that the job will have in all."""
        return self.ranks.num_nodes * self.ranks_per_node
