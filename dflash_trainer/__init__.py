"""The library around train_dflash.py: what prevents, reports or stores. Imported, never run."""
