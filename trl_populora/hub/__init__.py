"""Publishing a population, and starting from a published one: uploads, model card, dataset card of the archive."""
