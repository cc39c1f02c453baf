"""What serving is: requests, blocks, batches, the scheduler, the trace and the engine loop.

Standard library only: nothing in here knows a tensor, a model or the clock on the wall.
Reading order: request, batch, clock, prefix_cache, block_manager, policies, scheduler, trace, engine.
"""
