"""One seeded simulation of scheduler core, KV-cache core and fake workers, and the mutants that it must catch."""
