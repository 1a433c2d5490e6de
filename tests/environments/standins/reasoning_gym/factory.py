"""The shape of the package's registry, in its own names."""

from .coaching import CURRICULA  # noqa: F401

DATASETS = {}


def register_dataset(name, dataset_cls, config_cls, curriculum_cls=None):
    DATASETS[name] = dataset_cls, config_cls


def create_dataset(name, **settings):
    dataset_cls, config_cls = DATASETS[name]
    return dataset_cls(config_cls(**settings))
