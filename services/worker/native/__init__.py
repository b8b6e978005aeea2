"""The worker's native backend: a model on the CPU engine of ``treadle_kernels.cpu``, without torch.

Weights run in the number formats that the files have, or in those that were asked for at load; activations are float32,
quantised to int8 per group of 32 within linear layers. Read in this order: ``recipe`` (which tensor runs in which
format), ``packing`` and ``packed_file`` (from the model's files to one packed file that workers share), ``weights``
(from there to the engine's model), ``request_table``, ``step_arrays`` and ``runner`` (steps), ``loading`` (all of it in
order).
Guarantees: numpy and the engine only; a token depends on its request alone, whatever else is in the step.
"""
