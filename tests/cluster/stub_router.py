"""A router that knows heartbeats and Status, and nothing else. Run as a script: stub_router.py PORT."""

import json
import os
import sys
import threading
from concurrent import futures

import grpc

from baton.proto import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc


class Membership(worker_pb2_grpc.MembershipServicer):
    def __init__(self):
        self.states = {}
        self.starting = {}
        self.epochs = {}

    def Starting(self, request, context):
        self.starting[request.worker_id] = request
        return worker_pb2.StartingReply()

    def Heartbeat(self, request, context):
        self.states[request.worker_id] = request
        self.epochs.setdefault(request.worker_id, set()).add(request.epoch)
        return worker_pb2.HeartbeatReply(known=True)


class Admin(admin_pb2_grpc.AdminServicer):
    def __init__(self, membership):
        self.membership = membership

    def Status(self, request, context):
        reply = admin_pb2.StatusReply(model="stub", version="0")
        for name, state in list(self.membership.states.items()):
            status = admin_pb2.WorkerStatus(state=state, alive=True, num_epochs=len(self.membership.epochs[name]))
            reply.workers.append(status)
        for name, worker in list(self.membership.starting.items()):
            if worker.epoch not in self.membership.epochs.get(name, ()):
                reply.starting.append(worker)
        return reply


def main():
    server = grpc.server(futures.ThreadPoolExecutor(4))
    membership = Membership()
    worker_pb2_grpc.add_MembershipServicer_to_server(membership, server)
    admin_pb2_grpc.add_AdminServicer_to_server(Admin(membership), server)
    port = server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    server.start()
    print(json.dumps({"grpc_port": port}), flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    server.wait_for_termination()


main()
