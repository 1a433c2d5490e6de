"""Sessions of `trainer_adapters._type: http`: runs elsewhere that sample and train here."""
