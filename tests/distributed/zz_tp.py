import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from tests.distributed.models import *
def go(dp,tp):
    mesh=init_device_mesh("cpu",(dp,tp),mesh_dim_names=("dp","tp")) if dp>1 else init_device_mesh("cpu",(tp,),mesh_dim_names=("tp",))
    ref=trained(whole_model(1)); 
    m=whole_model(1)
    if tp>1: m=tensor_parallel(m,mesh["tp"] if dp>1 else mesh)
    if dp>1: m=fsdp(m,mesh["dp"] if tp>1 else mesh)
    full={n:(p.full_tensor() if hasattr(p,'full_tensor') else p).detach().clone() for n,p in m.named_parameters()}
    diff0=[n for n,p in ref.model.named_parameters() if not torch.equal(p,full[n])]
    t=trained(m)
    t.steps(2); ref.steps(2)
    diff={n:(p-(q.full_tensor() if hasattr(q,'full_tensor') else q)).abs().max().item() for (n,p),(_,q) in zip(ref.model.named_parameters(),t.model.named_parameters())}
    pl={n:(tuple(p.shape), tuple(p.to_local().shape),getattr(p,'placements',None)) for n,p in m.named_parameters()}
    return diff0, max(diff.values()), {n:(type(b).__name__,) for n,b in m.named_buffers()}, pl
