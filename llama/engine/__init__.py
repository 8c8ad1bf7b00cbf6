"""Our schedule and the published one, the sampler, stops, the cache, compiled decoding."""
