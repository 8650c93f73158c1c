"""Speech data: audio, manifests, batches and an embedded corpus."""
