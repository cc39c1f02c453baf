"""The real model: files, decoder, paged KV cache, attention, sampler, tokenizer, and the runner that ties them."""
