"""Trains an actor and critic by proximal policy optimization (PPO) on many cart-poles at once, which are written in PyTorch."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from measuring import DEVICE, Clock, compiled, run
from torch import nn
from torch.distributions import Categorical

DISCOUNT = 0.99
TRACE = 0.95
CLIP = 0.2
EPOCHS = 2


class CartPoles:
    """Carts with a pole each, as in the classic control task; those that have fallen begin anew."""

    def __init__(self, count: int) -> None:
        self.state = self.fresh(count)

    @staticmethod
    def fresh(count: int) -> torch.Tensor:
        return torch.rand(count, 4, device=DEVICE) * 0.1 - 0.05

    @staticmethod
    def physics(state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next state, and whether poles have fallen."""
        position, speed, angle, turn = state.unbind(-1)
        force = torch.where(action == 1, 10.0, -10.0)
        sin, cos = angle.sin(), angle.cos()
        push = (force + 0.05 * turn.square() * sin) / 1.1
        turning = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos.square() / 1.1))
        moving = push - 0.05 * turning * cos / 1.1
        after = torch.stack(
            [position + 0.02 * speed, speed + 0.02 * moving, angle + 0.02 * turn, turn + 0.02 * turning], -1
        )
        return after, (after[:, 0].abs() > 2.4) | (after[:, 2].abs() > 12 * math.pi / 180)


class Agent(nn.Module):
    """Scores of the actions, and the value of a state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.actor = self.network(width, 2)
        self.critic = self.network(width, 1)

    @staticmethod
    def network(width: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)
        )

    def forward(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(state), self.critic(state).squeeze(-1)


@dataclass
class Rollout:
    """What was seen in some steps of all carts; each field has a row for each step."""

    states: torch.Tensor
    actions: torch.Tensor
    chances: torch.Tensor
    values: torch.Tensor
    fallen: torch.Tensor
    last_value: torch.Tensor

    def advantages(self) -> torch.Tensor:
        """Return generalized advantage estimates."""
        found = torch.zeros_like(self.values)
        following, after = torch.zeros_like(self.last_value), self.last_value
        for step in reversed(range(len(self.values))):
            goes_on = 1.0 - self.fallen[step]
            error = goes_on + DISCOUNT * after * goes_on - self.values[step]
            following = error + DISCOUNT * TRACE * goes_on * following
            found[step], after = following, self.values[step]
        return found


def loss_of(
    agent: Agent,
    states: torch.Tensor,
    actions: torch.Tensor,
    before: torch.Tensor,
    gains: torch.Tensor,
    returns: torch.Tensor,
) -> torch.Tensor:
    """Return the clipped loss of policy and values, less some entropy."""
    scores, values = agent(states)
    logs = scores.log_softmax(-1)
    ratio = (logs.gather(-1, actions[:, None]).squeeze(-1) - before).exp()
    gains = (gains - gains.mean()) / (gains.std() + 1e-8)
    policy = -torch.minimum(ratio * gains, ratio.clamp(1 - CLIP, 1 + CLIP) * gains).mean()
    entropy = -(logs.exp() * logs).sum(-1).mean()
    return policy + 0.5 * (values - returns).square().mean() - 0.01 * entropy


def main(mode: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Play and learn for `steps` rounds."""
    carts, horizon, width = (16, 8, 16) if tiny else (512, 16, 64)
    agent = Agent(width).to(DEVICE)
    act, physics, objective = (compiled(each, mode) for each in (agent, CartPoles.physics, loss_of))
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
    world = CartPoles(carts)

    @torch.no_grad()
    def play() -> Rollout:
        seen = []
        for _ in range(horizon):
            # In reduce-overhead mode, results last until the next step begins.
            torch.compiler.cudagraph_mark_step_begin()
            scores, values = act(world.state)
            choice = Categorical(logits=scores.clone())
            action = choice.sample()
            after, fallen = physics(world.state, action)
            seen.append((world.state, action, choice.log_prob(action), values.clone(), fallen.float()))
            world.state = torch.where(fallen[:, None], world.fresh(carts), after)
        last = act(world.state)[1].clone()
        states, actions, chances, values, falls = (torch.stack(each) for each in zip(*seen, strict=True))
        return Rollout(states, actions, chances, values, falls, last)

    def learn(rollout: Rollout) -> torch.Tensor:
        gains = rollout.advantages()
        returns = gains + rollout.values
        fields = (rollout.states, rollout.actions, rollout.chances, gains, returns)
        flat = [each.flatten(0, 1) for each in fields]
        for _ in range(EPOCHS):
            for part in torch.randperm(carts * horizon, device=DEVICE).chunk(2):
                loss = objective(agent, *(each[part] for each in flat))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        return loss

    clock = Clock(steps)
    shares = []
    for _ in range(steps):
        clock.begin()
        rollout = play()
        learn(rollout)
        clock.end()
        shares.append(rollout.fallen.mean())
    share = torch.stack(shares)
    # A rounding error may turn an action, and all that follows: only means are compared.
    early, late = share[: steps // 2].mean().item(), share[steps // 2 :].mean().item()
    return clock.result(tolerance=0.1, falls=[early, late])


if __name__ == "__main__":
    run(main, __doc__)
