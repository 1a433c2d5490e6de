"""The shape of the package's registry, in its own names."""

from .coaching import CURRICULA

DATASETS = {}


def register_dataset(name, dataset_cls, config_cls, curriculum_cls=None):
    DATASETS[name] = dataset_cls, config_cls
    if curriculum_cls is not None:
        CURRICULA[name] = curriculum_cls


def has_curriculum(name):
    return name in CURRICULA


def create_curriculum(name):
    return CURRICULA[name]()


def create_dataset(name, **settings):
    dataset_cls, config_cls = DATASETS[name]
    return dataset_cls(config_cls(**settings))
