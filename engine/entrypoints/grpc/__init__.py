"""The Open Inference Protocol over gRPC, beside the HTTP server in the same event loop.

Needs grpcio, the extra `grpc`: only `launch.grpc_server` imports what needs it.
"""
